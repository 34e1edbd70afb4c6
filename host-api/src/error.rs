//! What goes wrong, as a caller sees it: RFC 9457 problem documents with a stable code.

use crate::lifecycle::State;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

/// The codes. A code, once released, keeps its meaning, status and `retryable`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    InvalidJson,
    InvalidField,
    UnknownField,
    MissingField,
    InvalidQuery,
    Unauthorized,
    Forbidden,
    RouteNotFound,
    SandboxNotFound,
    CommandNotFound,
    TemplateNotFound,
    FileNotFound,
    FileForbidden,
    FileConflict,
    FileInvalid,
    FileFailed,
    MethodNotAllowed,
    SandboxNotRunning,
    SandboxNotReady,
    CommandNotRunning,
    RequestTimeout,
    BodyTooLarge,
    UnsupportedMediaType,
    RangeNotSatisfiable,
    RequestIdReused,
    OutputGone,
    Internal,
    SandboxFailed,
    StoreUnavailable,
    HostCapacity,
    GuestUnavailable,
    GuestBusy,
    DiskFull,
    HostDiskFull,
}

impl Code {
    /// (code, status, title, retryable)
    pub fn parts(self) -> (&'static str, u16, &'static str, bool) {
        match self {
            Code::InvalidJson => ("invalid_json", 400, "The body is not valid JSON", false),
            Code::InvalidField => ("invalid_field", 400, "A field has a value it cannot have", false),
            Code::UnknownField => {
                ("unknown_field", 400, "The request has a field that does not exist", false)
            }
            Code::MissingField => ("missing_field", 400, "A required field is missing", false),
            Code::InvalidQuery => ("invalid_query", 400, "A query parameter is unknown or invalid", false),
            Code::Unauthorized => ("unauthorized", 401, "No valid key was given", false),
            Code::Forbidden => ("forbidden", 403, "The key may not do this", false),
            Code::RouteNotFound => ("route_not_found", 404, "No such address", false),
            Code::SandboxNotFound => ("sandbox_not_found", 404, "No such sandbox", false),
            Code::CommandNotFound => ("command_not_found", 404, "No such command", false),
            Code::TemplateNotFound => ("template_not_found", 404, "No such template", false),
            Code::FileNotFound => ("file_not_found", 404, "No such file in the sandbox", false),
            Code::FileForbidden => ("file_forbidden", 403, "The user may not do this to the file", false),
            Code::FileConflict => ("file_conflict", 409, "The path is not what the operation needs", false),
            Code::FileInvalid => ("file_invalid", 400, "The guest does not take this path or user", false),
            Code::FileFailed => ("file_failed", 500, "The file operation failed in the guest", false),
            Code::MethodNotAllowed => ("method_not_allowed", 405, "The address has no such method", false),
            Code::SandboxNotRunning => ("sandbox_not_running", 409, "The sandbox is not running", false),
            Code::SandboxNotReady => ("sandbox_not_ready", 409, "The sandbox is not running yet", true),
            Code::RequestTimeout => ("request_timeout", 408, "The request stopped half way", true),
            Code::CommandNotRunning => ("command_not_running", 409, "The command has ended", false),
            Code::BodyTooLarge => ("body_too_large", 413, "The body is too large", false),
            Code::UnsupportedMediaType => ("unsupported_media_type", 415, "The body must be JSON", false),
            Code::RangeNotSatisfiable => {
                ("range_not_satisfiable", 416, "The offset lies past the end", false)
            }
            Code::RequestIdReused => {
                ("request_id_reused", 422, "The request id was used for another request", false)
            }
            Code::OutputGone => ("output_gone", 410, "The output went with its sandbox", false),
            Code::Internal => ("internal", 500, "The daemon failed", true),
            Code::SandboxFailed => ("sandbox_failed", 500, "The sandbox could not be made", false),
            Code::StoreUnavailable => {
                ("store_unavailable", 503, "The daemon cannot record anything now", true)
            }
            Code::HostCapacity => ("host_capacity", 503, "The host has no room for this sandbox now", true),
            Code::GuestUnavailable => ("guest_unavailable", 504, "The guest does not answer", true),
            Code::GuestBusy => ("guest_busy", 503, "The guest takes no more operations at once", true),
            Code::DiskFull => ("disk_full", 507, "The sandbox's disk is full", false),
            Code::HostDiskFull => {
                ("host_disk_full", 507, "The host has no room to record anything now", true)
            }
        }
    }

    fn retry_after_ms(self) -> Option<u64> {
        match self {
            Code::SandboxNotReady => Some(500),
            Code::RequestTimeout
            | Code::Internal
            | Code::StoreUnavailable
            | Code::GuestUnavailable
            | Code::GuestBusy => Some(1_000),
            Code::HostCapacity => Some(2_000),
            Code::HostDiskFull => Some(5_000),
            _ => None,
        }
    }
}

/// An error on its way to the caller. Nothing is half done when one is returned.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{detail}")]
pub struct Problem {
    pub code: Code,
    pub detail: String,
    /// The sandbox this is about, where the caller may not know its id yet.
    pub sandbox_id: Option<String>,
    /// Why that sandbox failed, for `sandbox_failed`.
    pub reason: Option<String>,
}

impl Problem {
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self { code, detail: detail.into(), sandbox_id: None, reason: None }
    }

    pub fn field(name: &str, what: impl std::fmt::Display) -> Self {
        Self::new(Code::InvalidField, format!("field `{name}`: {what}"))
    }

    /// A sandbox that takes nothing now, because of the state it is in. It is worth coming back while it may yet run.
    pub fn not_running(sandbox: impl std::fmt::Display, state: State) -> Self {
        match state {
            State::Creating | State::Resuming => {
                Self::new(Code::SandboxNotReady, format!("sandbox {sandbox} is {state}, not running yet"))
            }
            _ => Self::new(Code::SandboxNotRunning, format!("sandbox {sandbox} is {state}, not running")),
        }
    }

    /// An error that is the daemon's own fault: the cause goes to the log, not to the caller.
    pub fn internal(what: &str, cause: impl std::fmt::Display) -> Self {
        tracing::error!(%cause, "{what}");
        Self::new(Code::Internal, format!("{what}; the daemon's log has the cause"))
    }
}

impl From<crate::store::StoreError> for Problem {
    fn from(cause: crate::store::StoreError) -> Self {
        tracing::error!(%cause, "the store failed");
        if cause.disk_full() {
            let detail = "the disk that the daemon records on is full: nothing was changed; make room, then send it again";
            return Self::new(Code::HostDiskFull, detail);
        }
        Self::new(Code::StoreUnavailable, "the daemon's store failed; the daemon's log has the cause")
    }
}

/// RFC 9457 problem document.
#[derive(Debug, Serialize, ToSchema)]
pub struct ProblemDocument {
    #[serde(rename = "type")]
    #[schema(example = "urn:bivouac:problem:sandbox_not_found")]
    kind: String,
    title: &'static str,
    status: u16,
    /// Stable, for programs.
    #[schema(example = "sandbox_not_found")]
    code: &'static str,
    /// In plain words, naming the field or id.
    detail: String,
    /// Whether the same request may succeed later.
    retryable: bool,
    /// When to try again, in milliseconds; present where `retryable` is true.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (code, status, title, retryable) = self.code.parts();
        let retry_after_ms = self.code.retry_after_ms();
        let document = ProblemDocument {
            kind: format!("urn:bivouac:problem:{code}"),
            title,
            status,
            code,
            detail: self.detail,
            retryable,
            retry_after_ms,
            sandbox_id: self.sandbox_id,
            reason: self.reason,
        };
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(document)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(ms) = retry_after_ms {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1_000)));
        }
        if status == StatusCode::REQUEST_TIMEOUT {
            // What is left of the request may still come: it must not be taken for another one.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
