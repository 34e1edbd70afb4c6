//! HTTP. Handlers translate and nothing else: a request into typed values, a result into a document.
//!
//! What must never happen here: a decision, a state kept between requests, or work that ends because a caller hung up
//! (what changes something runs in a task of its own, and the handler waits for it).

mod commands;
mod documents;
mod events;
mod extract;
mod files;
mod health;
mod patience;
mod sandboxes;
mod stream;
mod templates;
#[cfg(test)]
mod tests;
mod usage;

use crate::daemon::Daemon;
use crate::error::{Code, Problem};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{Method, Uri};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::get;
use axum::{Json, Router};
use std::sync::Arc;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type App = Arc<Daemon>;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Bivouac",
        description = "Throw-away microVMs for AI agents. Every sandbox is a machine with a kernel of its own; a \
                       command submitted twice under one `request_id` runs once. Errors are RFC 9457 problem documents \
                       with a stable `code`; an unknown field is an error.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    tags(
        (name = "sandboxes", description = "Create, look at and delete machines"),
        (name = "commands", description = "Run programs, once per request_id, and read what they wrote"),
        (name = "files", description = "Files in and out"),
        (name = "templates", description = "What sandboxes are made from"),
        (name = "accounting", description = "Usage and the audit trail"),
        (name = "operation", description = "Health, metrics, this document"),
    ),
    modifiers(&BearerKey)
)]
struct Description;

struct BearerKey;

impl Modify for BearerKey {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .bearer_format("biv_<key id>_<secret>")
            .description(Some("The organization is the key's; nothing in a request names one."))
            .build();
        let components = openapi.components.get_or_insert_default();
        components.add_security_scheme("key", SecurityScheme::Http(scheme));
    }
}

fn routes() -> (Router<App>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(sandboxes::create, sandboxes::list))
        .routes(routes!(sandboxes::get, sandboxes::delete))
        .routes(routes!(sandboxes::logs))
        .routes(routes!(commands::submit::submit, commands::list))
        .routes(routes!(commands::get))
        .routes(routes!(commands::output::output))
        .routes(routes!(commands::control::cancel))
        .routes(routes!(commands::control::signal))
        .routes(routes!(stream::stream))
        .routes(routes!(files::get, files::put))
        .routes(routes!(templates::list))
        .routes(routes!(templates::get))
        .routes(routes!(usage::list))
        .routes(routes!(events::list))
        .routes(routes!(health::health))
        .routes(routes!(health::metrics))
        .split_for_parts()
}

/// The OpenAPI document.
pub fn openapi() -> utoipa::openapi::OpenApi {
    routes().1
}

/// Everything the daemon serves.
pub fn router(daemon: Arc<Daemon>) -> Router {
    let (router, document) = routes();
    let document = Arc::new(document);
    router
        .route("/openapi.json", get(move || async move { Json(document.as_ref().clone()) }))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        // Each handler has its own limit: files are of any size.
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(Arc::clone(&daemon), patience::limit))
        .layer(middleware::from_fn_with_state(Arc::clone(&daemon), count))
        .with_state(daemon)
}

async fn count(State(daemon): State<App>, request: Request, next: Next) -> Response {
    crate::metrics::Metrics::count(&daemon.metrics.requests);
    next.run(request).await
}

async fn no_route(uri: Uri) -> Problem {
    Problem::new(
        Code::RouteNotFound,
        format!("there is nothing at {}; /openapi.json lists what there is", uri.path()),
    )
}

async fn no_method(method: Method, uri: Uri) -> Problem {
    Problem::new(Code::MethodNotAllowed, format!("{} has no method {method}", uri.path()))
}
