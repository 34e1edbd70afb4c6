//! Running a command: from a request's body to a row, and the wait for its end.

use super::{BRIEFLY, WaitQuery, answer, wait};
use crate::api::App;
use crate::api::documents::CommandDocument;
use crate::api::extract::{Body, Params, Sandbox, fingerprint, request_id};
use crate::api::sandboxes::{check_env, check_text, mark};
use crate::commands;
use crate::error::{Code, Problem, ProblemDocument};
use crate::ids::CommandId;
use crate::limits;
use crate::store::NewCommand;
use axum::extract::State as Shared;
use axum::http::HeaderMap;
use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use utoipa::ToSchema;

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
