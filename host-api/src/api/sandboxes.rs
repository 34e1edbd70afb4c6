//! `/v1/sandboxes`.

use super::App;
use super::documents::{self, DeleteDocument, SandboxDocument, Time};
use super::extract::{
    Body, Caller, Params, Sandbox, after, cursor, fingerprint, page_size, request_id, short,
};
use crate::auth::Identity;
use crate::error::{Code, Problem, ProblemDocument};
use crate::lifecycle::{DeletionReason, State};
use crate::limits;
use crate::machine::log_path;
use crate::sandboxes::{self, CreateRequest};
use crate::store::Details;
use crate::templates::{Template, TemplateError};
use axum::Json;
use axum::extract::State as Shared;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};

/// Most of a log that is served, from its end.
const LOG_BYTES: u64 = 1 << 20;

/// What a new sandbox is to be.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSandbox {
    #[schema(example = "python")]
    pub template: String,
    /// Idempotency key: 1 to 128 visible ASCII characters. The same id with the same body returns the same sandbox.
    pub request_id: Option<String>,
    #[schema(max_length = 128)]
    pub name: Option<String>,
    /// The caller's own labels.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Added to the template's environment for every command.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Milliseconds from creation to its deletion. Without it, it lives until it is deleted.
    #[schema(minimum = 1)]
    pub ttl_ms: Option<i64>,
    #[schema(minimum = 64, maximum = 65536)]
    pub memory_mib: Option<u32>,
    #[schema(minimum = 1, maximum = 32)]
    pub vcpus: Option<u32>,
    /// Size of its own disk. The host gives the next larger size it has.
    #[schema(minimum = 1)]
    pub disk_mib: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
pub enum Flag {
    #[serde(rename = "0", alias = "false")]
    No,
    #[serde(rename = "1", alias = "true")]
    Yes,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct CreateQuery {
    /// `0`: answer `202` at once instead of waiting until the sandbox runs.
    wait: Option<Flag>,
}

/// Create a sandbox.
///
/// Answers when it is usable: the first command sent after `running` is taken. A failed creation is a problem with code
/// `sandbox_failed` that names the sandbox and the reason; that sandbox is listed as `failed`. The same `request_id` with
/// the same body gets the sandbox it made, as it is by then, with header `Idempotent-Replayed: true`: a retry that comes
/// after its deletion makes no second one. A request id is remembered for as long as its sandbox, and longer.
#[utoipa::path(
    post, path = "/v1/sandboxes", tag = "sandboxes", params(CreateQuery), request_body = CreateSandbox,
    security(("key" = [])),
    responses(
        (status = 200, description = "A retry; the sandbox was deleted meanwhile", body = SandboxDocument),
        (status = 201, description = "It runs", body = SandboxDocument),
        (status = 202, description = "Accepted; asked for with `wait=0`", body = SandboxDocument),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn create(
    Shared(app): Shared<App>,
    Caller(caller): Caller,
    Params(query): Params<CreateQuery>,
    headers: HeaderMap,
    Body(body): Body<CreateSandbox>,
) -> Result<Response, Problem> {
    let request = checked(&app, caller, &headers, body).await?;
    // A task of its own: a caller who hangs up stops nothing half way.
    let daemon = Arc::clone(&app);
    let created = tokio::spawn(async move { sandboxes::create(&daemon, request).await })
        .await
        .unwrap_or_else(|e| Err(Problem::internal("the sandbox could not be made", e)))?;
    let replayed = created.replayed;
    let (made, row) = match query.wait {
        Some(Flag::No) => (StatusCode::ACCEPTED, created.row),
        _ => (StatusCode::CREATED, sandboxes::creation_result(&app, created).await?),
    };
    let location = format!("/v1/sandboxes/{}", row.id);
    let document = documents::sandbox(&row, app.clock.now())?;
    let status = if document.delete_accepted_at.is_some() { StatusCode::OK } else { made };
    let mut response = (status, Json(document)).into_response();
    mark(response.headers_mut(), &location, replayed);
    Ok(response)
}

pub(super) fn mark(headers: &mut HeaderMap, location: &str, replayed: bool) {
    if let Ok(location) = HeaderValue::from_str(location) {
        headers.insert(header::LOCATION, location);
    }
    if replayed {
        headers.insert(HeaderName::from_static("idempotent-replayed"), HeaderValue::from_static("true"));
    }
}

async fn checked(
    app: &App,
    caller: Identity,
    headers: &HeaderMap,
    mut body: CreateSandbox,
) -> Result<CreateRequest, Problem> {
    let request_id = request_id(headers, body.request_id.take())?;
    let fingerprint = fingerprint(&body)?;
    check_text("name", body.name.as_deref(), limits::NAME)?;
    check_env("env", &body.env)?;
    check_metadata(&body.metadata)?;
    if let Some(ttl) = body.ttl_ms
        && !(1..=limits::TTL_MS_MAX).contains(&ttl)
    {
        return Err(Problem::field("ttl_ms", format!("it must be 1 to {}", limits::TTL_MS_MAX)));
    }
    let template = template(app, &body.template).await?;
    let vcpus = within("vcpus", body.vcpus.unwrap_or(template.vcpus), 1, limits::VCPUS_MAX)?;
    let memory_mib = body.memory_mib.unwrap_or(template.memory_mib);
    let memory_mib = within("memory_mib", memory_mib, limits::MEMORY_MIB_MIN, limits::MEMORY_MIB_MAX)?;
    let disk_mib = disk_size(app, body.disk_mib.unwrap_or(template.disk_mib))?;
    let json = |map: &BTreeMap<String, String>| {
        serde_json::to_string(map).map_err(|e| Problem::internal("the request could not be read", e))
    };
    Ok(CreateRequest {
        org: caller.org,
        actor: caller.key_id,
        request_id,
        fingerprint,
        metadata: json(&body.metadata)?,
        env: json(&body.env)?,
        name: body.name,
        template,
        vcpus,
        memory_mib,
        disk_mib,
        ttl_ms: body.ttl_ms,
    })
}

fn within(field: &str, value: u32, min: u32, max: u32) -> Result<u32, Problem> {
    if (min..=max).contains(&value) {
        return Ok(value);
    }
    Err(Problem::field(field, format!("{value} is not within {min} to {max}")))
}

fn disk_size(app: &App, wanted: u32) -> Result<u32, Problem> {
    let sizes = app.machines.disk_sizes();
    sizes.iter().copied().find(|size| *size >= wanted && wanted > 0).ok_or_else(|| {
        Problem::field("disk_mib", format!("{wanted} cannot be given; this host has disks of {sizes:?} MiB"))
    })
}

pub(super) async fn template(app: &App, name: &str) -> Result<Arc<Template>, Problem> {
    let (templates, wanted) = (app.templates.clone(), name.to_owned());
    // It may have to read a whole image, once.
    tokio::task::spawn_blocking(move || templates.get(&wanted))
        .await
        .map_err(|e| Problem::internal("the template could not be read", e))?
        .map_err(|e| match e {
            TemplateError::NotFound(name) => {
                Problem::new(Code::TemplateNotFound, format!("there is no template `{}`", short(&name)))
            }
            broken @ TemplateError::Broken { .. } => Problem::internal("the template cannot be used", broken),
        })
}

pub(super) fn check_text(field: &str, text: Option<&str>, max: usize) -> Result<(), Problem> {
    match text {
        Some(text) if text.is_empty() || text.len() > max || text.contains('\0') => {
            Err(Problem::field(field, format!("it must be 1 to {max} bytes without a zero byte")))
        }
        _ => Ok(()),
    }
}

pub(super) fn check_env(field: &str, env: &BTreeMap<String, String>) -> Result<(), Problem> {
    if env.len() > limits::ENV_ITEMS {
        return Err(Problem::field(field, format!("it has more than {} entries", limits::ENV_ITEMS)));
    }
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            let what =
                format!("`{}` is not a name: it must not be empty or hold `=` or a zero byte", short(name));
            return Err(Problem::field(field, what));
        }
        if value.contains('\0') {
            return Err(Problem::field(field, format!("the value of `{}` holds a zero byte", short(name))));
        }
    }
    let bytes: usize = env.iter().map(|(name, value)| name.len().saturating_add(value.len())).sum();
    if bytes > limits::ARGV_AND_ENV {
        return Err(Problem::field(field, format!("it has more than {} bytes", limits::ARGV_AND_ENV)));
    }
    Ok(())
}

fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), Problem> {
    let bytes: usize = metadata.iter().map(|(name, value)| name.len().saturating_add(value.len())).sum();
    if metadata.len() > limits::METADATA_ITEMS || bytes > limits::METADATA {
        let what =
            format!("it takes {} entries and {} bytes at most", limits::METADATA_ITEMS, limits::METADATA);
        return Err(Problem::field("metadata", what));
    }
    Ok(())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// 1 to 1000; 100 if left out.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
    /// One state, or `all`. Left out: all but the deleted.
    state: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct SandboxList {
    pub items: Vec<SandboxDocument>,
    /// Where the next page starts; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// List sandboxes, oldest first.
#[utoipa::path(
    get, path = "/v1/sandboxes", tag = "sandboxes", params(ListQuery), security(("key" = [])),
    responses(
        (status = 200, description = "One page", body = SandboxList),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn list(
    Shared(app): Shared<App>,
    Caller(caller): Caller,
    Params(query): Params<ListQuery>,
) -> Result<Json<SandboxList>, Problem> {
    let limit = page_size(query.limit)?;
    if let Some(state) = &query.state
        && state != "all"
        && State::parse(state).is_none()
    {
        let known: Vec<_> = State::ALL.iter().map(|state| state.as_str()).collect();
        let detail = format!("query: `state` must be `all` or one of {}", known.join(", "));
        return Err(Problem::new(Code::InvalidQuery, detail));
    }
    let after = after(query.cursor.as_deref())?;
    let mut rows =
        app.store.sandboxes(&caller.org, query.state.as_deref(), after, limit.saturating_add(1)).await?;
    let next_cursor = next_page(&mut rows, limit, |row| row.seq);
    let now = app.clock.now();
    let items = rows.iter().map(|row| documents::sandbox(row, now)).collect::<Result<_, _>>()?;
    Ok(Json(SandboxList { items, next_cursor }))
}

/// Cuts a page that was read with one row too many, and says where the next one starts.
pub(super) fn next_page<T>(rows: &mut Vec<T>, limit: i64, seq: impl Fn(&T) -> i64) -> Option<String> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if rows.len() <= limit {
        return None;
    }
    rows.truncate(limit);
    rows.last().map(|row| cursor(seq(row)))
}

/// Look at a sandbox. A deleted one can still be looked at.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path, description = "Id of the sandbox")),
    security(("key" = [])),
    responses(
        (status = 200, description = "As it is now", body = SandboxDocument),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn get(Shared(app): Shared<App>, sandbox: Sandbox) -> Result<Json<SandboxDocument>, Problem> {
    Ok(Json(documents::sandbox(&sandbox.row, app.clock.now())?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct DeleteQuery {
    /// `1`: wait until everything is released, and answer `200` with the sandbox as it was at the last.
    wait: Option<Flag>,
}

/// Delete a sandbox.
///
/// Accepted in every state. The answer comes once the delete is on disk: nothing brings the sandbox back, and nothing
/// after `delete_accepted_at` is billed. A second delete answers the same.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    params(("id" = String, Path, description = "Id of the sandbox"), DeleteQuery),
    security(("key" = [])),
    responses(
        (status = 200, description = "Released; asked for with `wait=1`", body = SandboxDocument),
        (status = 202, description = "Accepted, durably", body = DeleteDocument),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn delete(
    Shared(app): Shared<App>,
    sandbox: Sandbox,
    Params(query): Params<DeleteQuery>,
) -> Result<Response, Problem> {
    let Sandbox { caller, id, live, .. } = sandbox;
    let (daemon, wanted) = (Arc::clone(&app), id.clone());
    let accepted = tokio::spawn(async move {
        let details = Details { actor: Some(caller.key_id), ..Details::default() };
        sandboxes::delete(&daemon, &wanted, DeletionReason::Request, details).await
    })
    .await
    .unwrap_or_else(|e| Err(Problem::internal("the delete could not be recorded", e)))?;
    let row =
        accepted.ok_or_else(|| Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{id}`")))?;
    if query.wait == Some(Flag::Yes)
        && sandboxes::wait_released(live).await
        && let Some(row) = app.store.sandbox(id.as_str()).await?
    {
        return Ok(Json(documents::sandbox(&row, app.clock.now())?).into_response());
    }
    let record = row.record()?;
    let deletion = record
        .deletion
        .ok_or_else(|| Problem::internal("the delete could not be recorded", "no deletion in the row"))?;
    let document = DeleteDocument {
        id: row.id,
        delete_accepted_at: Time(deletion.at),
        delete_reason: deletion.reason,
        billing_ended_at: Time(deletion.at),
    };
    Ok((StatusCode::ACCEPTED, Json(document)).into_response())
}

/// What the monitor, and the guest's console if it has one, have said. At most the last 1 MiB.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/logs", tag = "sandboxes",
    params(("id" = String, Path, description = "Id of the sandbox")),
    security(("key" = [])),
    responses(
        (status = 200, description = "The log; empty for most sandboxes", body = String, content_type = "text/plain"),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn logs(Shared(app): Shared<App>, sandbox: Sandbox) -> Result<Response, Problem> {
    let path = log_path(&app.data_dir, sandbox.id.as_str());
    let text = tokio::task::spawn_blocking(move || -> std::io::Result<Vec<u8>> {
        let mut file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(e),
        };
        let start = file.metadata()?.len().saturating_sub(LOG_BYTES);
        file.seek(SeekFrom::Start(start))?;
        let mut text = Vec::new();
        file.take(LOG_BYTES).read_to_end(&mut text)?;
        Ok(text)
    })
    .await
    .map_err(|e| Problem::internal("the log could not be read", e))?
    .map_err(|e| Problem::internal("the log could not be read", e))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], String::from_utf8_lossy(&text).into_owned())
        .into_response())
}
