//! `/v1/health` and `/metrics`, which need no key.

use super::App;
use crate::error::{Problem, ProblemDocument};
use axum::Json;
use axum::extract::State as Shared;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    #[schema(example = "ok")]
    pub status: &'static str,
    pub version: &'static str,
}

/// Whether the daemon serves.
#[utoipa::path(
    get, path = "/v1/health", tag = "operation",
    responses((status = 200, description = "It does", body = Health))
)]
pub async fn health() -> Json<Health> {
    Json(Health { status: "ok", version: env!("CARGO_PKG_VERSION") })
}

/// Counters in Prometheus' text format.
#[utoipa::path(
    get, path = "/metrics", tag = "operation",
    responses(
        (status = 200, description = "Metrics", body = String, content_type = "text/plain"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn metrics(Shared(app): Shared<App>) -> Result<Response, Problem> {
    let states = app.store.count_by_state().await?;
    let text = app.metrics.text(&states, app.admission.usage());
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}
