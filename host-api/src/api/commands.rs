//! `/v1/sandboxes/{id}/commands`.

use super::App;
use super::documents::{self, CommandDocument};
use super::extract::{Body, Command, Params, Sandbox, after, fingerprint, page_size, request_id};
use super::sandboxes::{check_env, check_text, mark, next_page};
use crate::commands::{self, OutputReader, StreamName};
use crate::error::{Code, Problem, ProblemDocument};
use crate::ids::CommandId;
use crate::limits;
use crate::sandboxes::Live;
use crate::spool::Extent;
use crate::store::{CommandRow, NewCommand};
use axum::Json;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use utoipa::{IntoParams, ToSchema};

/// How long a command that is to run in the background, to be canceled or signalled, is waited for.
const BRIEFLY: Duration = Duration::from_secs(10);
/// Bytes of output read at a time.
const PIECE: usize = 256 << 10;

/// Bytes as text, or as base64.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(untagged, expecting = "it must be text, or an object {encoding: \"base64\", data}")]
pub enum Bytes {
    Text(String),
    Encoded(Base64Bytes),
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Base64Bytes {
    pub encoding: Base64Name,
    pub data: String,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub enum Base64Name {
    #[serde(rename = "base64")]
    Base64,
}

/// What to run. Exactly one of `argv` and `shell`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SubmitCommand {
    /// Idempotency key, required here or as header `Idempotency-Key`: 1 to 128 visible ASCII characters. The same id
    /// with the same body runs once, however often it is sent.
    #[schema(example = "build-17")]
    pub request_id: Option<String>,
    /// Program and arguments.
    #[schema(example = json!(["python3", "-c", "print(6 * 7)"]))]
    pub argv: Option<Vec<String>>,
    /// A line for `/bin/sh -c`.
    pub shell: Option<String>,
    pub cwd: Option<String>,
    /// Added to the sandbox's environment, and overriding it.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Name or number; the template's user if left out.
    pub user: Option<String>,
    /// Standard input, followed by end of file. At most 1 MiB.
    pub stdin: Option<Bytes>,
    /// Milliseconds until the whole command is ended: TERM, two seconds of grace, KILL.
    #[schema(minimum = 1)]
    pub timeout_ms: Option<i64>,
    /// Bytes of each stream that are kept: the first and the last half of it. 1 MiB if left out.
    #[schema(minimum = 1024, maximum = 67108864)]
    pub output_limit_bytes: Option<u64>,
    /// Answer `202` once it has started, instead of when it has ended.
    #[serde(default)]
    pub background: bool,
    /// Wait for this long at most. It bounds the wait, not the command, and is no part of the request's identity.
    #[schema(minimum = 0)]
    pub wait_ms: Option<u64>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct WaitQuery {
    /// Wait for the end, for this long at most.
    wait_ms: Option<u64>,
}

/// Run a command.
///
/// It is on disk before anything is sent to the guest, and runs at most once per `request_id`: a retry gets the same
/// command, at whatever stage it is, with header `Idempotent-Replayed: true`. A caller who hangs up stops nothing.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/commands", tag = "commands",
    params(("id" = String, Path, description = "Id of the sandbox"), WaitQuery),
    request_body = SubmitCommand, security(("key" = [])),
    responses(
        (status = 200, description = "It has ended", body = CommandDocument),
        (status = 202, description = "It has not ended yet", body = CommandDocument),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn submit(
    Shared(app): Shared<App>,
    sandbox: Sandbox,
    Params(query): Params<WaitQuery>,
    headers: HeaderMap,
    Body(mut body): Body<SubmitCommand>,
) -> Result<Response, Problem> {
    let wait_ms = query.wait_ms.or(body.wait_ms.take());
    let background = body.background;
    let new = checked(&app, &sandbox, &headers, body)?;
    let (daemon, live) = (Arc::clone(&app), sandbox.live.clone());
    let submitted = tokio::spawn(async move { commands::submit(&daemon, live, new).await })
        .await
        .unwrap_or_else(|e| Err(Problem::internal("the command could not be accepted", e)))?;

    let row = submitted.row;
    if background && wait_ms.is_none() {
        commands::wait_end(sandbox.live.as_ref(), &row.id, Some(BRIEFLY), |p| p.started || p.ended).await;
    } else {
        wait(sandbox.live.as_ref(), &row, wait_ms).await;
    }
    let location = format!("/v1/sandboxes/{}/commands/{}", row.sandbox_id, row.id);
    let mut response = answer(&app, sandbox.live.as_ref(), &row).await?;
    mark(response.headers_mut(), &location, submitted.replayed);
    Ok(response)
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

pub(super) async fn document(app: &App, row: &CommandRow) -> Result<CommandDocument, Problem> {
    let kept = |stream| {
        let reader = OutputReader::new(app, row, stream);
        async move {
            reader.kept().await.map_err(|e| Problem::internal("the recorded output could not be read", e))
        }
    };
    let streams = (kept(StreamName::Stdout).await?, kept(StreamName::Stderr).await?);
    documents::command(row, Some(streams))
}

fn checked(
    app: &App,
    sandbox: &Sandbox,
    headers: &HeaderMap,
    mut body: SubmitCommand,
) -> Result<NewCommand, Problem> {
    let request_id = request_id(headers, body.request_id.take())?.ok_or_else(|| {
        let detail =
            "missing field `request_id`: your key for this command; send the same again when you retry";
        Problem::new(Code::MissingField, detail)
    })?;
    let fingerprint = fingerprint(&body)?;
    check_text("cwd", body.cwd.as_deref(), limits::PATH)?;
    check_text("user", body.user.as_deref(), limits::USER)?;
    check_env("env", &body.env)?;
    let argv = argv(body.argv, body.shell)?;
    let env_bytes: usize = body.env.iter().map(|(name, value)| name.len().saturating_add(value.len())).sum();
    let argv_bytes: usize = argv.iter().map(String::len).sum();
    if env_bytes.saturating_add(argv_bytes) > limits::ARGV_AND_ENV {
        let what = format!("argv and environment together are above {} bytes", limits::ARGV_AND_ENV);
        return Err(Problem::field("argv", what));
    }
    if let Some(timeout) = body.timeout_ms
        && !(1..=limits::TIMEOUT_MS_MAX).contains(&timeout)
    {
        return Err(Problem::field("timeout_ms", format!("it must be 1 to {}", limits::TIMEOUT_MS_MAX)));
    }
    let output_limit_bytes = body.output_limit_bytes.unwrap_or(limits::OUTPUT_DEFAULT);
    if !(limits::OUTPUT_MIN..=limits::OUTPUT_MAX).contains(&output_limit_bytes) {
        let what = format!("it must be {} to {}", limits::OUTPUT_MIN, limits::OUTPUT_MAX);
        return Err(Problem::field("output_limit_bytes", what));
    }
    let json = |e| Problem::internal("the request could not be read", e);
    Ok(NewCommand {
        id: CommandId::new().to_string(),
        sandbox_id: sandbox.id.to_string(),
        org: sandbox.caller.org.clone(),
        actor: sandbox.caller.key_id.clone(),
        request_id,
        fingerprint,
        argv: serde_json::to_string(&argv).map_err(json)?,
        cwd: body.cwd,
        env: serde_json::to_string(&body.env).map_err(json)?,
        user: body.user,
        stdin: stdin(body.stdin)?,
        timeout_ms: body.timeout_ms,
        output_limit_bytes,
        background: body.background,
        at: app.clock.now(),
    })
}

fn argv(argv: Option<Vec<String>>, shell: Option<String>) -> Result<Vec<String>, Problem> {
    let argv = match (argv, shell) {
        (Some(argv), None) => argv,
        (None, Some(line)) => vec!["/bin/sh".to_owned(), "-c".to_owned(), line],
        (Some(_), Some(_)) => return Err(Problem::field("shell", "send `argv` or `shell`, not both")),
        (None, None) => {
            return Err(Problem::new(Code::MissingField, "missing field `argv`, or `shell` instead"));
        }
    };
    if argv.first().is_none_or(String::is_empty) {
        return Err(Problem::field("argv", "its first item, the program, must not be empty"));
    }
    if argv.len() > limits::ARGV_ITEMS {
        return Err(Problem::field("argv", format!("it has more than {} items", limits::ARGV_ITEMS)));
    }
    if argv.iter().any(|item| item.contains('\0')) {
        return Err(Problem::field("argv", "an item holds a zero byte"));
    }
    Ok(argv)
}

fn stdin(stdin: Option<Bytes>) -> Result<Vec<u8>, Problem> {
    let bytes = match stdin {
        None => Vec::new(),
        Some(Bytes::Text(text)) => text.into_bytes(),
        Some(Bytes::Encoded(encoded)) => STANDARD
            .decode(&encoded.data)
            .map_err(|e| Problem::field("stdin.data", format!("it is not base64: {e}")))?,
    };
    if bytes.len() > limits::STDIN {
        return Err(Problem::field(
            "stdin",
            format!("it has more than {} bytes; put a file there instead", limits::STDIN),
        ));
    }
    Ok(bytes)
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
                return Err(super::files::problem(cause, &row.id));
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
            SIGNALS.iter().find(|(known, _)| *known == plain).map(|(_, number)| *number).ok_or_else(|| {
                Problem::field("signal", format!("`{}` is not a signal's name", super::extract::short(name)))
            })
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
    app.agents.signal(live.cid(), &row.id, number).await.map_err(|e| super::files::problem(e, &row.id))?;
    answer(&app, sandbox.live.as_ref(), &row).await
}
