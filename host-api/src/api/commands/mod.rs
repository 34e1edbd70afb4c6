//! `/v1/sandboxes/{id}/commands`: looking at commands, and what all of their handlers share.

pub mod control;
pub mod output;
pub mod submit;

use super::App;
use super::documents::{self, CommandDocument};
use super::extract::{Command, Params, Sandbox, after, page_size};
use super::sandboxes::next_page;
use crate::commands::{self, OutputReader, StreamName};
use crate::error::{Problem, ProblemDocument};
use crate::sandboxes::Live;
use crate::store::CommandRow;
use axum::Json;
use axum::extract::State as Shared;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use utoipa::{IntoParams, ToSchema};

/// How long a command that is to run in the background, to be canceled or signalled, is waited for.
const BRIEFLY: Duration = Duration::from_secs(10);

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct WaitQuery {
    /// Wait for the end, for this long at most.
    wait_ms: Option<u64>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// 1 to 1000; 100 if left out.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct CommandList {
    /// Without their output.
    pub items: Vec<CommandDocument>,
    /// Where the next page starts; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// List the commands of a sandbox, oldest first, without their output.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/commands", tag = "commands",
    params(("id" = String, Path, description = "Id of the sandbox"), ListQuery), security(("key" = [])),
    responses(
        (status = 200, description = "One page", body = CommandList),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn list(
    Shared(app): Shared<App>,
    sandbox: Sandbox,
    Params(query): Params<ListQuery>,
) -> Result<Json<CommandList>, Problem> {
    let limit = page_size(query.limit)?;
    let after = after(query.cursor.as_deref())?;
    let mut rows = app.store.commands(sandbox.id.as_str(), after, limit.saturating_add(1)).await?;
    let next_cursor = next_page(&mut rows, limit, |row| row.seq);
    let shown = rows.into_iter().map(|row| commands::overlaid(sandbox.live.as_ref(), row));
    let items = shown.map(|row| documents::command(&row, None)).collect::<Result<_, _>>()?;
    Ok(Json(CommandList { items, next_cursor }))
}

/// Look at a command, and wait for its end if asked to.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/commands/{command_id}", tag = "commands",
    params(
        ("id" = String, Path, description = "Id of the sandbox"),
        ("command_id" = String, Path, description = "Id of the command"),
        WaitQuery
    ),
    security(("key" = [])),
    responses(
        (status = 200, description = "As it is now", body = CommandDocument),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn get(
    Shared(app): Shared<App>,
    command: Command,
    Params(query): Params<WaitQuery>,
) -> Result<Json<CommandDocument>, Problem> {
    let Command { sandbox, row } = command;
    if query.wait_ms.is_some() {
        wait(sandbox.live.as_ref(), &row, query.wait_ms).await;
    }
    let row = commands::current(&app, sandbox.live.as_ref(), &row).await?;
    Ok(Json(document(&app, &row).await?))
}

/// Waits for the end: as long as the caller will, and never longer than it can be worth.
async fn wait(live: Option<&Arc<Live>>, row: &CommandRow, wait_ms: Option<u64>) {
    let worth = commands::watchdog(row.timeout_ms);
    let limit = match (wait_ms.map(Duration::from_millis), worth) {
        (Some(asked), Some(worth)) => Some(asked.min(worth)),
        (asked, worth) => asked.or(worth),
    };
    commands::wait_end(live, &row.id, limit, |progress| progress.ended).await;
}

/// The command as it is now: `200` if it has ended, `202` if not.
async fn answer(app: &App, live: Option<&Arc<Live>>, row: &CommandRow) -> Result<Response, Problem> {
    let row = commands::current(app, live, row).await?;
    let status = if row.status()?.ended() { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(document(app, &row).await?)).into_response())
}

async fn document(app: &App, row: &CommandRow) -> Result<CommandDocument, Problem> {
    let kept = |stream| {
        let reader = OutputReader::new(app, row, stream);
        async move {
            reader.kept().await.map_err(|e| Problem::internal("the recorded output could not be read", e))
        }
    };
    let streams = (kept(StreamName::Stdout).await?, kept(StreamName::Stderr).await?);
    documents::command(row, Some(streams))
}
