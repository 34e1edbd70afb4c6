//! `/v1/sandboxes/{id}/files`: raw bytes of any size, a chunk in memory at a time.

use super::App;
use super::extract::{Params, Sandbox};
use super::patience::stalled;
use super::sandboxes::check_text;
use crate::agent::{AgentError, Download, Upload};
use crate::auth;
use crate::error::{Code, Problem, ProblemDocument};
use crate::limits;
use crate::store::NewEvent;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State as Shared};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bivouac_protocol::agent::Refusal;
use futures_util::StreamExt;
use rustix::io::Errno;
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use utoipa::IntoParams;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct GetQuery {
    /// Path in the guest, which must be UTF-8 text: there is no way here to a file with another name.
    path: String,
    /// Whose rights apply; the template's user if left out.
    user: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct PutQuery {
    /// Path in the guest, which must be UTF-8 text. Its folder must exist.
    path: String,
    /// Whose rights apply, and who owns a new file; the template's user if left out.
    user: Option<String>,
    /// Permission bits in octal, such as `0755`. Left out: 0644 for a new file, unchanged for an old one.
    #[param(example = "0644")]
    mode: Option<String>,
}

/// Read a file.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(("id" = String, Path, description = "Id of the sandbox"), GetQuery), security(("key" = [])),
    responses(
        (status = 200, description = "Its bytes", body = [u8], content_type = "application/octet-stream", headers(
            ("Bivouac-File-Mode" = String, description = "Permission bits in octal"),
        )),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn get(
    Shared(app): Shared<App>,
    sandbox: Sandbox,
    Params(query): Params<GetQuery>,
) -> Result<Response, Problem> {
    check_text("path", Some(&query.path), limits::PATH)?;
    check_text("user", query.user.as_deref(), limits::USER)?;
    let live = sandbox.usable()?;
    let file = Download::open(&app.agents, live.cid(), &query.path, query.user)
        .await
        .map_err(|e| problem(e, &query.path))?;
    let size = file.info.size;
    record(&app, &sandbox, "file.read", json!({"path": query.path, "bytes": size})).await?;

    let mode = format!("{:04o}", file.info.mode & 0o7777);
    let chunks = futures_util::stream::try_unfold(file, |mut file| async move {
        let chunk = file.chunk().await.map_err(std::io::Error::other)?;
        Ok::<_, std::io::Error>(chunk.map(|chunk| (Bytes::from(chunk), file)))
    });
    let mut response = Response::new(Body::from_stream(chunks));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    if let Ok(mode) = HeaderValue::from_str(&mode) {
        headers.insert("bivouac-file-mode", mode);
    }
    Ok(response)
}

/// Write a file.
///
/// It is written beside and renamed: a reader sees the old file or the new one, and an upload that breaks off leaves the
/// old one.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/files", tag = "files",
    params(("id" = String, Path, description = "Id of the sandbox"), PutQuery),
    request_body(content = [u8], description = "The file's bytes", content_type = "application/octet-stream"),
    security(("key" = [])),
    responses(
        (status = 204, description = "Written", headers(("ETag" = String, description = "SHA-256 of the content"))),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn put(
    Shared(app): Shared<App>,
    sandbox: Sandbox,
    Params(query): Params<PutQuery>,
    request: Request,
) -> Result<Response, Problem> {
    check_text("path", Some(&query.path), limits::PATH)?;
    check_text("user", query.user.as_deref(), limits::USER)?;
    let mode = query.mode.as_deref().map(octal).transpose()?;
    let live = sandbox.usable()?;
    let told = |e| problem(e, &query.path);
    let mut upload =
        Upload::open(&app.agents, live.cid(), &query.path, query.user.clone(), mode).await.map_err(told)?;
    let mut body = request.into_body().into_data_stream();
    let (mut hasher, mut bytes) = (Sha256::new(), 0_u64);
    while let Some(data) = body.next().await {
        // Returning here drops the upload unfinished: the guest keeps the old file.
        let data = data.map_err(|e| {
            stalled(&e).unwrap_or_else(|| {
                Problem::new(Code::FileInvalid, "the upload broke off; the file is as it was")
            })
        })?;
        hasher.update(&data);
        bytes = bytes.saturating_add(u64::try_from(data.len()).unwrap_or(0));
        upload.chunk(&data).await.map_err(told)?;
    }
    let digest = auth::hex(&hasher.finalize());
    let what = json!({"path": query.path, "bytes": bytes, "sha256": digest});
    // On record before it is in place: where nothing can be recorded, nothing is to change.
    record(&app, &sandbox, "file.write", what.clone()).await?;
    if let Err(cause) = upload.finish().await {
        if let Err(lost) = record(&app, &sandbox, "file.write_failed", what).await {
            tracing::warn!(sandbox = %sandbox.id, cause = %lost, "that an upload failed could not be recorded");
        }
        return Err(told(cause));
    }
    let mut response = StatusCode::NO_CONTENT.into_response();
    if let Ok(etag) = HeaderValue::from_str(&format!("\"{digest}\"")) {
        response.headers_mut().insert(header::ETAG, etag);
    }
    Ok(response)
}

fn octal(text: &str) -> Result<u32, Problem> {
    let text = text.strip_prefix("0o").unwrap_or(text);
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o7777)
        .ok_or_else(|| Problem::field("mode", "it must be permission bits in octal, such as 0644"))
}

async fn record(app: &App, sandbox: &Sandbox, kind: &str, data: serde_json::Value) -> Result<(), Problem> {
    let event = NewEvent {
        org: &sandbox.row.org,
        at: app.clock.now(),
        kind,
        actor: &sandbox.caller.key_id,
        sandbox_id: Some(&sandbox.row.id),
        template_version: Some(&sandbox.row.template_version),
        data,
        ..NewEvent::default()
    };
    Ok(app.store.record(event).await?)
}

/// What a failed operation in a guest means to the caller. `subject` is the path or command it was about.
pub(super) fn problem(cause: AgentError, subject: &str) -> Problem {
    let subject = super::extract::short(subject);
    match cause {
        AgentError::Refused(Refusal::File { errno, detail }) => {
            let detail: String = detail.chars().take(512).collect();
            Problem::new(file_code(errno), format!("`{subject}`: {detail}"))
        }
        AgentError::Refused(Refusal::NotRegular { detail }) => {
            let detail: String = detail.chars().take(512).collect();
            Problem::new(Code::FileConflict, format!("`{subject}`: {detail}"))
        }
        AgentError::Refused(Refusal::Busy { .. }) => {
            Problem::new(Code::GuestBusy, format!("`{subject}`: the guest takes no more operations at once"))
        }
        AgentError::Refused(Refusal::Invalid { detail }) => {
            let detail: String = detail.chars().take(512).collect();
            Problem::new(Code::FileInvalid, format!("`{subject}`: {detail}"))
        }
        AgentError::Refused(Refusal::UnknownCommand | Refusal::Released) => {
            Problem::new(Code::CommandNotRunning, format!("command {subject} does not run in the guest"))
        }
        other => Problem::new(Code::GuestUnavailable, format!("`{subject}`: {other}")),
    }
}

fn file_code(errno: i32) -> Code {
    match Errno::from_raw_os_error(errno) {
        Errno::NOENT => Code::FileNotFound,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => Code::FileForbidden,
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Code::DiskFull,
        Errno::ISDIR | Errno::NOTDIR | Errno::EXIST | Errno::NOTEMPTY | Errno::TXTBSY | Errno::BUSY => {
            Code::FileConflict
        }
        Errno::NAMETOOLONG | Errno::LOOP | Errno::INVAL => Code::FileInvalid,
        _ => Code::FileFailed,
    }
}
