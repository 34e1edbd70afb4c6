//! Recorded output as raw bytes.

use crate::api::App;
use crate::api::extract::{Command, Params};
use crate::commands::{self, OutputReader, StreamName};
use crate::error::{Code, Problem, ProblemDocument};
use crate::spool::Extent;
use crate::store::CommandRow;
use axum::extract::State as Shared;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde::Deserialize;
use utoipa::IntoParams;

/// Bytes of output read at a time.
const PIECE: usize = 256 << 10;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct OutputQuery {
    /// `stdout` or `stderr`; `stdout` if left out.
    #[param(inline)]
    stream: Option<StreamName>,
    /// Absolute offset of the first byte wanted; 0 if left out.
    offset: Option<u64>,
}

/// Read recorded output as raw bytes, from any offset, during and after the run.
///
/// The body is what is recorded from the offset on, without a break; `Bivouac-Next-Offset` is where to read on. If
/// bytes from the offset on were dropped past the output limit, the body starts after the gap, and `Bivouac-Gap` names
/// it as `from-to`, `to` exclusive.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/commands/{command_id}/output", tag = "commands",
    params(
        ("id" = String, Path, description = "Id of the sandbox"),
        ("command_id" = String, Path, description = "Id of the command"),
        OutputQuery
    ),
    security(("key" = [])),
    responses(
        (status = 200, description = "Bytes", body = [u8], content_type = "application/octet-stream", headers(
            ("Bivouac-Offset" = u64, description = "Offset of the body's first byte"),
            ("Bivouac-Next-Offset" = u64, description = "Offset after the body's last byte"),
            ("Bivouac-Bytes-Total" = u64, description = "Bytes recorded so far, dropped ones included"),
            ("Bivouac-Ended" = bool, description = "Whether there will be no more"),
            ("Bivouac-Gap" = String, description = "Dropped bytes that were skipped, `from-to`"),
        )),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn output(
    Shared(app): Shared<App>,
    command: Command,
    Params(query): Params<OutputQuery>,
) -> Result<Response, Problem> {
    let Command { sandbox, row } = command;
    let stream = query.stream.unwrap_or(StreamName::Stdout);
    let offset = query.offset.unwrap_or(0);
    // Asked before the output is: "ended" then means that this is all of it.
    let ended = commands::current(&app, sandbox.live.as_ref(), &row).await?.status()?.ended();
    let reader = OutputReader::new(&app, &row, stream);
    let failed = |e| Problem::internal("the recorded output could not be read", e);
    let (extent, start, first) = reader.read(offset, PIECE).await.map_err(failed)?;
    check_offset(&row, stream, extent, offset, ended)?;
    let end = if start < extent.head_end && extent.dropped() > 0 { extent.head_end } else { extent.total };
    let body = whole(reader, start, end, first);
    let number = |n: u64| HeaderValue::from(n);
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, number(end.saturating_sub(start)));
    headers.insert("bivouac-offset", number(start));
    headers.insert("bivouac-next-offset", number(end.max(start)));
    headers.insert("bivouac-bytes-total", number(extent.total));
    headers.insert("bivouac-ended", HeaderValue::from_static(if ended { "true" } else { "false" }));
    if start > offset
        && let Ok(gap) = HeaderValue::from_str(&format!("{offset}-{start}"))
    {
        headers.insert("bivouac-gap", gap);
    }
    Ok(response)
}

fn check_offset(
    row: &CommandRow,
    stream: StreamName,
    extent: Extent,
    offset: u64,
    ended: bool,
) -> Result<(), Problem> {
    let told = match stream {
        StreamName::Stdout => row.stdout_bytes,
        StreamName::Stderr => row.stderr_bytes,
    };
    if extent.total == 0 && told.unwrap_or(0) > 0 {
        let detail = format!("the output of {} was removed with sandbox {}", row.id, row.sandbox_id);
        return Err(Problem::new(Code::OutputGone, detail));
    }
    if ended && offset > extent.total {
        let detail = format!("query: `offset` {offset} lies past the end, which is at {}", extent.total);
        return Err(Problem::new(Code::RangeNotSatisfiable, detail));
    }
    Ok(())
}

/// Recorded bytes `[start, end)`, piece by piece.
fn whole(reader: OutputReader, start: u64, end: u64, first: Vec<u8>) -> axum::body::Body {
    let state = (reader, start, Some(first));
    let pieces = futures_util::stream::try_unfold(state, move |(reader, at, first)| async move {
        let left = end.saturating_sub(at);
        if left == 0 {
            return Ok(None);
        }
        let (from, mut data) = match first {
            Some(first) => (at, first),
            None => {
                let (_, from, data) = reader.read(at, PIECE).await?;
                (from, data)
            }
        };
        data.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        if from != at || data.is_empty() {
            // The command is ahead of this reader, and has overwritten what comes next: broken off, not made up.
            return Err(std::io::Error::other("the output was overwritten while it was read"));
        }
        let next = at.saturating_add(u64::try_from(data.len()).unwrap_or(0));
        Ok(Some((axum::body::Bytes::from(data), (reader, next, None))))
    });
    axum::body::Body::from_stream(pieces)
}
