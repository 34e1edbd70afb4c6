//! `/v1/events`.

use super::App;
use super::documents::{self, EventDocument};
use super::extract::{Caller, Params, after, page_size};
use super::sandboxes::next_page;
use crate::error::{Problem, ProblemDocument};
use axum::Json;
use axum::extract::State as Shared;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct EventQuery {
    /// Only those of one sandbox.
    sandbox_id: Option<String>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// 1 to 1000; 100 if left out.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct EventList {
    pub items: Vec<EventDocument>,
    /// Where the next page starts; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// The audit trail, oldest first: append-only, and chained by hash so that a removed line shows.
#[utoipa::path(
    get, path = "/v1/events", tag = "accounting", params(EventQuery), security(("key" = [])),
    responses(
        (status = 200, description = "One page", body = EventList),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn list(
    Shared(app): Shared<App>,
    Caller(caller): Caller,
    Params(query): Params<EventQuery>,
) -> Result<Json<EventList>, Problem> {
    let limit = page_size(query.limit)?;
    let after = after(query.cursor.as_deref())?;
    let sandbox = query.sandbox_id.as_deref();
    let mut rows = app.store.events(&caller.org, sandbox, after, limit.saturating_add(1)).await?;
    let next_cursor = next_page(&mut rows, limit, |row| row.seq);
    Ok(Json(EventList { items: rows.into_iter().map(documents::event).collect(), next_cursor }))
}
