//! Commands about sandboxes that are one request each.

use crate::args::{Create, Format, Shape};
use crate::client::{Client, Failure, request_id};
use crate::show::{self, milliseconds, plain};
use reqwest::Method;
use serde_json::{Map, Value, json};

/// The body of a creation.
pub fn creation(template: &str, shape: &Shape, env: &[(String, String)], request_id: &str) -> Value {
    let mut body = Map::new();
    body.insert("template".to_owned(), json!(template));
    body.insert("request_id".to_owned(), json!(request_id));
    body.insert("env".to_owned(), object(env));
    let ttl_ms = shape.ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
    let optional = [
        ("memory_mib", json!(shape.memory_mib)),
        ("vcpus", json!(shape.vcpus)),
        ("disk_mib", json!(shape.disk_mib)),
        ("name", json!(shape.name)),
        ("ttl_ms", json!(ttl_ms)),
    ];
    body.extend(
        optional.into_iter().filter(|(_, value)| !value.is_null()).map(|(name, v)| (name.to_owned(), v)),
    );
    Value::Object(body)
}

pub fn object(pairs: &[(String, String)]) -> Value {
    Value::Object(pairs.iter().map(|(name, value)| (name.clone(), json!(value))).collect())
}

pub async fn create(client: &Client, args: Create, format: Format) -> Result<u8, Failure> {
    let id = args.request_id.unwrap_or_else(request_id);
    let mut body = creation(&args.template, &args.shape, &args.env, &id);
    body["metadata"] = object(&args.metadata);
    let path = if args.no_wait { "/v1/sandboxes?wait=0" } else { "/v1/sandboxes" };
    let made = client.post(path, &body).await?;
    match format {
        Format::Json => show::json(&made)?,
        Format::Table => show::line(&plain(&made["id"]))?,
    }
    if made["delete_accepted_at"].is_string() {
        // A request id that was used before: it stands for the sandbox it made then.
        return Err(Failure::Local(format!("{} was deleted; use another --request-id", plain(&made["id"]))));
    }
    Ok(0)
}

pub async fn list(client: &Client, all: bool, state: Option<String>, format: Format) -> Result<u8, Failure> {
    let state = if all { Some("all".to_owned()) } else { state };
    let path = match state {
        Some(state) => format!("/v1/sandboxes?state={}", crate::client::quoted(&state)),
        None => "/v1/sandboxes".to_owned(),
    };
    let items = client.list(&path).await?;
    if format == Format::Json {
        show::json(&json!({ "items": items }))?;
        return Ok(0);
    }
    let rows: Vec<_> = items
        .iter()
        .map(|s| {
            [
                plain(&s["id"]),
                plain(&s["state"]),
                plain(&s["template"]),
                plain(&s["name"]),
                plain(&s["created_at"]),
                plain(&s["expires_at"]),
            ]
        })
        .collect();
    show::table(["ID", "STATE", "TEMPLATE", "NAME", "CREATED", "EXPIRES"], &rows)?;
    Ok(0)
}

async fn document(client: &Client, path: &str, format: Format) -> Result<u8, Failure> {
    let document = client.get(path).await?;
    match format {
        Format::Json => show::json(&document)?,
        Format::Table => show::fields(&document)?,
    }
    Ok(0)
}

/// A sandbox's address. An id never leads to another address, whatever is in it.
pub fn address(sandbox: &str) -> String {
    format!("/v1/sandboxes/{}", crate::client::quoted(sandbox).replace('/', "%2F"))
}

pub async fn get(client: &Client, sandbox: &str, format: Format) -> Result<u8, Failure> {
    document(client, &address(sandbox), format).await
}

pub async fn remove(
    client: &Client,
    sandboxes: &[String],
    no_wait: bool,
    format: Format,
) -> Result<u8, Failure> {
    let mut removed = Vec::new();
    let mut failed = None;
    for sandbox in sandboxes {
        let wait = if no_wait { "" } else { "?wait=1" };
        match client.delete(&format!("{}{wait}", address(sandbox))).await {
            Ok(document) => removed.push(document),
            Err(failure) if sandboxes.len() == 1 => return Err(failure),
            Err(failure) => {
                eprintln!("bivouac: {failure}");
                failed = Some(());
            }
        }
    }
    match format {
        Format::Json => match removed.as_slice() {
            [one] => show::json(one)?,
            many => show::json(&json!({ "items": many }))?,
        },
        Format::Table => {
            for document in &removed {
                show::line(&plain(&document["id"]))?;
            }
        }
    }
    Ok(if failed.is_some() { crate::OWN_FAILURE } else { 0 })
}

pub async fn commands(client: &Client, sandbox: &str, format: Format) -> Result<u8, Failure> {
    let items = client.list(&format!("{}/commands", address(sandbox))).await?;
    if format == Format::Json {
        show::json(&json!({ "items": items }))?;
        return Ok(0);
    }
    let rows: Vec<_> = items
        .iter()
        .map(|c| {
            let argv: Vec<String> = c["argv"].as_array().into_iter().flatten().map(plain).collect();
            let result = [&c["exit_code"], &c["signal"], &c["termination_reason"]];
            let result = result.into_iter().find(|value| !value.is_null()).map(plain).unwrap_or_default();
            let short: String = argv.join(" ").chars().take(60).collect();
            [plain(&c["id"]), plain(&c["status"]), result, plain(&c["accepted_at"]), short.replace('\n', " ")]
        })
        .collect();
    show::table(["ID", "STATUS", "RESULT", "ACCEPTED", "COMMAND"], &rows)?;
    Ok(0)
}

pub async fn templates(client: &Client, format: Format) -> Result<u8, Failure> {
    let items = client.get("/v1/templates").await?;
    if format == Format::Json {
        show::json(&items)?;
        return Ok(0);
    }
    let rows: Vec<_> = items["items"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|t| {
            [
                plain(&t["name"]),
                plain(&t["version"]),
                plain(&t["vcpus"]),
                plain(&t["memory_mib"]),
                plain(&t["disk_mib"]),
                plain(&t["description"]),
            ]
        })
        .collect();
    show::table(["NAME", "VERSION", "VCPUS", "MEMORY MIB", "DISK MIB", "DESCRIPTION"], &rows)?;
    Ok(0)
}

pub async fn usage(client: &Client, sandbox: Option<String>, format: Format) -> Result<u8, Failure> {
    let path = match sandbox {
        Some(sandbox) => format!("/v1/usage?sandbox_id={}", crate::client::quoted(&sandbox)),
        None => "/v1/usage".to_owned(),
    };
    let items = client.list(&path).await?;
    if format == Format::Json {
        show::json(&json!({ "items": items }))?;
        return Ok(0);
    }
    let rows: Vec<_> = items
        .iter()
        .map(|u| {
            [
                plain(&u["sandbox_id"]),
                plain(&u["state"]),
                milliseconds(&u["wall_ms"]),
                milliseconds(&u["vcpu_ms"]),
                plain(&u["started_at"]),
                plain(&u["billing_ended_at"]),
                plain(&u["released_at"]),
            ]
        })
        .collect();
    show::table(["SANDBOX", "STATE", "WALL", "VCPU TIME", "STARTED", "BILLING ENDED", "RELEASED"], &rows)?;
    Ok(0)
}

pub async fn logs(client: &Client, sandbox: &str, format: Format) -> Result<u8, Failure> {
    let path = format!("{}/logs", address(sandbox));
    let response = client.send(|| client.request(Method::GET, &path)).await?;
    let text = response.text().await.map_err(|e| client.unreachable(&e))?;
    match format {
        Format::Json => show::json(&json!({ "log": text }))?,
        Format::Table => show::text(&text)?,
    }
    Ok(0)
}

pub async fn openapi(client: &Client) -> Result<u8, Failure> {
    show::json(&client.get("/openapi.json").await?)?;
    Ok(0)
}
