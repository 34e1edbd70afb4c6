//! `GET …/commands/{id}/stream`: output as it comes, as server-sent events.
//!
//! It reads what is recorded, so any number of readers, however slow, cost the command nothing; and an event's id holds
//! both offsets after it, so that a reader who comes back with `Last-Event-ID` misses nothing and sees nothing twice.

use super::App;
use super::documents::{self, chunk};
use super::extract::{Command, Params};
use crate::commands::{OutputReader, Progress, StreamName, current};
use crate::error::{Code, Problem, ProblemDocument};
use crate::sandboxes::Live;
use crate::store::CommandRow;
use axum::extract::State as Shared;
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use utoipa::IntoParams;

const PIECE: usize = 64 << 10;
const KEEP_ALIVE: Duration = Duration::from_secs(15);

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct StreamQuery {
    /// Where to start in standard output; 0 if left out. `Last-Event-ID` goes before.
    stdout_offset: Option<u64>,
    /// Where to start in standard error; 0 if left out.
    stderr_offset: Option<u64>,
}

struct Reader {
    app: App,
    live: Option<Arc<Live>>,
    row: CommandRow,
    progress: Option<watch::Receiver<Progress>>,
    stdout: u64,
    stderr: u64,
    done: bool,
}

/// Follow a command's output.
///
/// Events: `output` ({stream, offset, encoding, text or data}), `gap` ({stream, from, to}: bytes dropped past the output
/// limit), and last `end` (the command's document, without its output). Each has an id; send the last one seen as `Last-Event-ID` to go on
/// from there.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/commands/{command_id}/stream", tag = "commands",
    params(
        ("id" = String, Path, description = "Id of the sandbox"),
        ("command_id" = String, Path, description = "Id of the command"),
        ("Last-Event-ID" = Option<String>, Header, description = "Id of the last event seen, `<stdout>-<stderr>`"),
        StreamQuery
    ),
    security(("key" = [])),
    responses(
        (status = 200, description = "Events", body = String, content_type = "text/event-stream"),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn stream(
    Shared(app): Shared<App>,
    command: Command,
    Params(query): Params<StreamQuery>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let (stdout, stderr) = match headers.get("last-event-id") {
        None => (query.stdout_offset.unwrap_or(0), query.stderr_offset.unwrap_or(0)),
        Some(id) => id.to_str().ok().and_then(offsets).ok_or_else(|| {
            Problem::new(
                Code::InvalidQuery,
                "header `Last-Event-ID` is not the id of an event of this stream",
            )
        })?,
    };
    let Command { sandbox, row } = command;
    let progress =
        sandbox.live.as_ref().and_then(|live| live.command(&row.id)).map(|sender| sender.subscribe());
    let reader = Reader { app, live: sandbox.live, row, progress, stdout, stderr, done: false };
    let events = futures_util::stream::unfold(reader, |mut reader| async move {
        if reader.done {
            return None;
        }
        let event = reader.next().await.unwrap_or_else(|problem| {
            reader.done = true;
            Event::default().event("error").data(json!({"detail": problem.detail}).to_string())
        });
        Some((Ok::<_, std::convert::Infallible>(event), reader))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response())
}

fn offsets(id: &str) -> Option<(u64, u64)> {
    let (stdout, stderr) = id.split_once('-')?;
    Some((stdout.parse().ok()?, stderr.parse().ok()?))
}

impl Reader {
    async fn next(&mut self) -> Result<Event, Problem> {
        loop {
            // Looked at before the output is: if it has ended by now, what is read now is all there is.
            let ended = self.progress.as_mut().is_none_or(|progress| progress.borrow_and_update().ended);
            for stream in [StreamName::Stdout, StreamName::Stderr] {
                if let Some(event) = self.output(stream).await? {
                    return Ok(event);
                }
            }
            if ended {
                self.done = true;
                let row = current(&self.app, self.live.as_ref(), &self.row).await?;
                return self.event("end", &documents::command(&row, None)?);
            }
            if let Some(progress) = &mut self.progress
                && progress.changed().await.is_err()
            {
                self.progress = None;
            }
        }
    }

    async fn output(&mut self, stream: StreamName) -> Result<Option<Event>, Problem> {
        let at = if stream == StreamName::Stdout { self.stdout } else { self.stderr };
        let reader = OutputReader::new(&self.app, &self.row, stream);
        let (_, from, mut data) = reader
            .read(at, PIECE)
            .await
            .map_err(|e| Problem::internal("the recorded output could not be read", e))?;
        if from > at {
            self.advance(stream, from);
            return self.event("gap", &json!({"stream": stream, "from": at, "to": from})).map(Some);
        }
        if data.is_empty() {
            return Ok(None);
        }
        whole_characters(&mut data);
        let next = at.saturating_add(u64::try_from(data.len()).unwrap_or(0));
        self.advance(stream, next);
        self.event("output", &chunk(stream, at, data)).map(Some)
    }

    fn advance(&mut self, stream: StreamName, to: u64) {
        match stream {
            StreamName::Stdout => self.stdout = to,
            StreamName::Stderr => self.stderr = to,
        }
    }

    fn event(&self, kind: &str, data: &impl serde::Serialize) -> Result<Event, Problem> {
        Event::default()
            .event(kind)
            .id(format!("{}-{}", self.stdout, self.stderr))
            .json_data(data)
            .map_err(|e| Problem::internal("an event could not be written", e))
    }
}

/// Leaves a character that is cut off at the end to the next event, if something is left without it.
fn whole_characters(data: &mut Vec<u8>) {
    if let Err(e) = std::str::from_utf8(data)
        && e.error_len().is_none()
        && e.valid_up_to() > 0
    {
        data.truncate(e.valid_up_to());
    }
}
