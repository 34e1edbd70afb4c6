//! Ending a command early, and signals to it.

use super::{BRIEFLY, answer};
use crate::api::App;
use crate::api::documents::CommandDocument;
use crate::api::extract::{Body, Command, Sandbox, short};
use crate::api::files::problem;
use crate::commands;
use crate::error::{Code, Problem, ProblemDocument};
use crate::store::CommandRow;
use axum::extract::State as Shared;
use axum::response::Response;
use serde::Deserialize;
use std::time::Duration;
use utoipa::ToSchema;

/// Cancel a command: TERM to all of it, KILL after two seconds. One that has ended stays as it is.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/commands/{command_id}/cancel", tag = "commands",
    params(
        ("id" = String, Path, description = "Id of the sandbox"),
        ("command_id" = String, Path, description = "Id of the command"),
    ),
    security(("key" = [])),
    responses(
        (status = 200, description = "It has ended", body = CommandDocument),
        (status = 202, description = "It has not ended yet", body = CommandDocument),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn cancel(Shared(app): Shared<App>, command: Command) -> Result<Response, Problem> {
    let Command { sandbox, row } = command;
    if running(&app, &sandbox, &row).await? {
        let live = sandbox.usable()?;
        if let Err(cause) = app.agents.cancel(live.cid(), &row.id).await {
            // It may have ended in between, which is as good.
            commands::wait_end(Some(live), &row.id, Some(Duration::from_millis(100)), |p| p.ended).await;
            if running(&app, &sandbox, &row).await? {
                return Err(problem(cause, &row.id));
            }
        }
        commands::wait_end(Some(live), &row.id, Some(BRIEFLY), |progress| progress.ended).await;
    }
    answer(&app, sandbox.live.as_ref(), &row).await
}

/// Whether it has not ended; waits for its start first, since the guest does not know it before.
async fn running(app: &App, sandbox: &Sandbox, row: &CommandRow) -> Result<bool, Problem> {
    if row.status()?.ended() {
        return Ok(false);
    }
    commands::wait_end(sandbox.live.as_ref(), &row.id, Some(BRIEFLY), |p| p.started || p.ended).await;
    Ok(!commands::current(app, sandbox.live.as_ref(), row).await?.status()?.ended())
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SendSignal {
    /// Name, as in `TERM`, or number.
    signal: Signal,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "it must be a name such as \"TERM\", or a number")]
pub enum Signal {
    Number(i32),
    Name(String),
}

/// Linux's numbers on x86, which are the guest's.
const SIGNALS: [(&str, i32); 18] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ABRT", 6),
    ("KILL", 9),
    ("USR1", 10),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("WINCH", 28),
];

fn signal_number(signal: &Signal) -> Result<i32, Problem> {
    match signal {
        Signal::Number(number) if (1..=64).contains(number) => Ok(*number),
        Signal::Number(number) => Err(Problem::field("signal", format!("{number} is not within 1 to 64"))),
        Signal::Name(name) => {
            let plain = name.strip_prefix("SIG").unwrap_or(name);
            SIGNALS
                .iter()
                .find(|(known, _)| *known == plain)
                .map(|(_, number)| *number)
                .ok_or_else(|| Problem::field("signal", format!("`{}` is not a signal's name", short(name))))
        }
    }
}

/// Send a signal to a command's process group.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/commands/{command_id}/signal", tag = "commands",
    params(
        ("id" = String, Path, description = "Id of the sandbox"),
        ("command_id" = String, Path, description = "Id of the command"),
    ),
    request_body = SendSignal, security(("key" = [])),
    responses(
        (status = 200, description = "Sent; the command has ended since", body = CommandDocument),
        (status = 202, description = "Sent", body = CommandDocument),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn signal(
    Shared(app): Shared<App>,
    command: Command,
    Body(body): Body<SendSignal>,
) -> Result<Response, Problem> {
    let Command { sandbox, row } = command;
    let number = signal_number(&body.signal)?;
    if !running(&app, &sandbox, &row).await? {
        return Err(Problem::new(Code::CommandNotRunning, format!("command {} has ended", row.id)));
    }
    let live = sandbox.usable()?;
    app.agents.signal(live.cid(), &row.id, number).await.map_err(|e| problem(e, &row.id))?;
    answer(&app, sandbox.live.as_ref(), &row).await
}
