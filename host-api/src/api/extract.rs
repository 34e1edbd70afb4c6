//! From a request to typed values. Past this border nothing is checked again, before it nothing is trusted.

use super::App;
use super::patience::stalled;
use crate::auth::{self, Identity};
use crate::error::{Code, Problem};
use crate::ids::{CommandId, SandboxId};
use crate::lifecycle::State;
use crate::limits;
use crate::sandboxes::Live;
use crate::store::{CommandRow, SandboxRow};
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, header};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Headers that name an organization in other products. Here the key does, and a caller who sends one is told so.
const ORG_HEADERS: [&str; 6] =
    ["x-organization", "x-organization-id", "x-org", "x-org-id", "x-tenant-id", "organization"];

/// Somebody with a valid key that allows the method.
pub struct Caller(pub Identity);

impl FromRequestParts<App> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let key = bearer(&parts.headers)
            .ok_or_else(|| Problem::new(Code::Unauthorized, "send `Authorization: Bearer <key>`"))?;
        let identity = auth::identify(&app.store, key, app.clock.now())
            .await?
            .ok_or_else(|| Problem::new(Code::Unauthorized, "the key is not valid"))?;
        if let Some(name) = ORG_HEADERS.iter().find(|name| parts.headers.contains_key(**name)) {
            let detail =
                format!("header `{name}`: the organization comes from the key, and from nowhere else");
            return Err(Problem::new(Code::UnknownField, detail));
        }
        let reads = matches!(parts.method, Method::GET | Method::HEAD);
        if !reads && identity.scopes.split(' ').all(|scope| scope == "read") {
            return Err(Problem::new(Code::Forbidden, "the key may only read"));
        }
        Ok(Caller(identity))
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// A sandbox of the caller's own organization. Another's is not found, exactly as one that never was.
pub struct Sandbox {
    pub caller: Identity,
    pub id: SandboxId,
    pub row: SandboxRow,
    pub live: Option<Arc<Live>>,
}

impl Sandbox {
    /// Its guest, if it can be reached now.
    pub fn usable(&self) -> Result<&Arc<Live>, Problem> {
        self.live.as_ref().filter(|live| live.view().usable()).ok_or_else(|| {
            let state = self.live.as_ref().map_or(State::Deleted, |live| live.view().state);
            Problem::not_running(&self.id, state)
        })
    }
}

async fn path_param(parts: &mut Parts, app: &App, name: &str) -> Option<String> {
    let params = RawPathParams::from_request_parts(parts, app).await.ok()?;
    params.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
}

impl FromRequestParts<App> for Sandbox {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let Caller(caller) = Caller::from_request_parts(parts, app).await?;
        let text = path_param(parts, app, "id").await.unwrap_or_default();
        let missing =
            || Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{}`", short(&text)));
        let id = SandboxId::parse(&text).ok_or_else(missing)?;
        let row = app.store.sandbox(&text).await?.filter(|row| row.org == caller.org).ok_or_else(missing)?;
        let live = app.live(&id);
        Ok(Sandbox { caller, id, row, live })
    }
}

/// A command of such a sandbox.
pub struct Command {
    pub sandbox: Sandbox,
    pub row: CommandRow,
}

impl FromRequestParts<App> for Command {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let sandbox = Sandbox::from_request_parts(parts, app).await?;
        let text = path_param(parts, app, "command_id").await.unwrap_or_default();
        let missing = || {
            let detail = format!("sandbox {} has no command `{}`", sandbox.id, short(&text));
            Problem::new(Code::CommandNotFound, detail)
        };
        let id = CommandId::parse(&text).ok_or_else(missing)?;
        let row = app.store.command(sandbox.id.as_str(), id.as_str()).await?.ok_or_else(missing)?;
        Ok(Command { sandbox, row })
    }
}

/// Text from outside, cut to what belongs in a message.
pub fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

/// A JSON body, with errors that name the field.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &App) -> Result<Self, Problem> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let kind = kind.and_then(|kind| kind.split(';').next()).map(str::trim).unwrap_or_default();
        if !kind.eq_ignore_ascii_case("application/json") {
            let detail = format!("the body must be `Content-Type: application/json`, not `{}`", short(kind));
            return Err(Problem::new(Code::UnsupportedMediaType, detail));
        }
        let bytes = axum::body::to_bytes(request.into_body(), limits::JSON_BODY).await.map_err(|e| {
            if let Some(problem) = stalled(&e) {
                problem
            } else if std::error::Error::source(&e)
                .is_some_and(|cause| cause.to_string().contains("length limit"))
            {
                Problem::new(
                    Code::BodyTooLarge,
                    format!("a JSON body has at most {} bytes", limits::JSON_BODY),
                )
            } else {
                Problem::new(Code::InvalidJson, "the body broke off")
            }
        })?;
        parse(&bytes).map(Body)
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    // A list of values in the order of the fields would do for the deserializer, and is nobody's intention.
    if let Ok(other) = serde_json::from_slice::<serde_json::Value>(bytes)
        && let Some(kind) = not_an_object(&other)
    {
        return Err(Problem::new(
            Code::InvalidField,
            format!("the body: expected a JSON object, not {kind}"),
        ));
    }
    let mut input = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut input).map_err(|e| {
        let path = e.path().to_string();
        let cause = e.into_inner();
        let text = cause.to_string();
        let told = text.split(" at line ").next().unwrap_or(&text);
        if !cause.is_data() {
            return Problem::new(Code::InvalidJson, format!("the body is not valid JSON: {text}"));
        }
        if told.starts_with("unknown field") {
            return Problem::new(Code::UnknownField, told);
        }
        if told.starts_with("missing field") {
            return Problem::new(Code::MissingField, told);
        }
        if path == "." { Problem::new(Code::InvalidField, told) } else { Problem::field(&path, told) }
    })?;
    input.end().map_err(|e| Problem::new(Code::InvalidJson, format!("the body is not valid JSON: {e}")))?;
    Ok(value)
}

fn not_an_object(value: &serde_json::Value) -> Option<&'static str> {
    match value {
        serde_json::Value::Object(_) => None,
        serde_json::Value::Null => Some("null"),
        serde_json::Value::Bool(_) => Some("a boolean"),
        serde_json::Value::Number(_) => Some("a number"),
        serde_json::Value::String(_) => Some("a string"),
        serde_json::Value::Array(_) => Some("an array"),
    }
}

/// Query parameters; an unknown one is an error.
pub struct Params<T>(pub T);

impl<T: DeserializeOwned> FromRequestParts<App> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
        if let Some(name) = parts.uri.query().and_then(not_text) {
            let what = format!("query: `{}` is not UTF-8 once its percent-encoding is undone", short(&name));
            return Err(Problem::new(Code::InvalidQuery, what));
        }
        let query = axum::extract::Query::<T>::try_from_uri(&parts.uri).map_err(|e| {
            let text = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
            Problem::new(Code::InvalidQuery, format!("query: {text}"))
        })?;
        Ok(Params(query.0))
    }
}

/// The first parameter of a query that is not text. Undoing the encoding further on would put a replacement character
/// for each such byte, and a path would name another file than was meant.
fn not_text(query: &str) -> Option<String> {
    let broken = query.split('&').find(|pair| percent_decode_str(pair).decode_utf8().is_err())?;
    let name = broken.split('=').next().unwrap_or(broken);
    Some(percent_decode_str(name).decode_utf8_lossy().into_owned())
}

/// The caller's idempotency key, from the body or the header `Idempotency-Key`.
pub fn request_id(headers: &HeaderMap, body: Option<String>) -> Result<Option<String>, Problem> {
    let header = match headers.get("idempotency-key") {
        None => None,
        Some(value) => Some(value.to_str().map_err(|_| bad_request_id())?.to_owned()),
    };
    let id = match (header, body) {
        (Some(header), Some(body)) if header != body => {
            let detail =
                "field `request_id` and header `Idempotency-Key` differ: send one, or the same twice";
            return Err(Problem::new(Code::InvalidField, detail));
        }
        (header, body) => body.or(header),
    };
    match &id {
        Some(id)
            if !(1..=limits::REQUEST_ID).contains(&id.len()) || !id.bytes().all(|b| b.is_ascii_graphic()) =>
        {
            Err(bad_request_id())
        }
        _ => Ok(id),
    }
}

fn bad_request_id() -> Problem {
    Problem::field("request_id", format!("it must be 1 to {} visible ASCII characters", limits::REQUEST_ID))
}

/// What tells one body from another.
pub fn fingerprint(body: &impl serde::Serialize) -> Result<String, Problem> {
    let text = serde_json::to_vec(body).map_err(|e| Problem::internal("the request could not be read", e))?;
    Ok(auth::hex(&Sha256::digest(&text)))
}

/// A place in a list, opaque to callers.
pub fn cursor(seq: i64) -> String {
    URL_SAFE_NO_PAD.encode(format!("after:{seq}"))
}

pub fn after(cursor: Option<&str>) -> Result<i64, Problem> {
    let Some(cursor) = cursor else { return Ok(0) };
    URL_SAFE_NO_PAD
        .decode(cursor)
        .ok()
        .and_then(|bytes| String::from_utf8(bytes).ok())
        .and_then(|text| text.strip_prefix("after:")?.parse().ok())
        .filter(|seq| *seq >= 0)
        .ok_or_else(|| Problem::new(Code::InvalidQuery, "query: `cursor` is not one that a list returned"))
}

pub fn page_size(limit: Option<i64>) -> Result<i64, Problem> {
    match limit.unwrap_or(limits::PAGE_DEFAULT) {
        limit if (1..=limits::PAGE_MAX).contains(&limit) => Ok(limit),
        _ => {
            Err(Problem::new(Code::InvalidQuery, format!("query: `limit` must be 1 to {}", limits::PAGE_MAX)))
        }
    }
}
