//! `/v1/templates`.

use super::App;
use super::extract::Caller;
use super::sandboxes::template;
use crate::error::{Problem, ProblemDocument};
use crate::templates::Template;
use axum::Json;
use axum::extract::{Path, State as Shared};
use serde::Serialize;
use std::collections::BTreeMap;
use utoipa::ToSchema;

#[derive(Debug, Serialize, ToSchema)]
pub struct TemplateDocument {
    #[schema(example = "python")]
    pub name: String,
    pub description: String,
    /// The active version; sandboxes keep the one they were cut from.
    pub version: String,
    /// Digest of its root image.
    #[schema(example = "sha256:…")]
    pub digest: String,
    pub image_bytes: u64,
    pub vcpus: u32,
    pub memory_mib: u32,
    pub disk_mib: u32,
    /// Whom commands run as.
    pub user: String,
    /// Where they run.
    pub workdir: String,
    pub env: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct TemplateList {
    pub items: Vec<TemplateDocument>,
}

fn document(template: &Template) -> TemplateDocument {
    TemplateDocument {
        name: template.name.clone(),
        description: template.description.clone(),
        version: template.version.clone(),
        digest: template.digest.clone(),
        image_bytes: template.image_bytes,
        vcpus: template.vcpus,
        memory_mib: template.memory_mib,
        disk_mib: template.disk_mib,
        user: template.user.clone(),
        workdir: template.workdir.clone(),
        env: template.env.clone(),
    }
}

/// List what sandboxes can be made from.
#[utoipa::path(
    get, path = "/v1/templates", tag = "templates", security(("key" = [])),
    responses(
        (status = 200, description = "All of them, by name", body = TemplateList),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn list(Shared(app): Shared<App>, Caller(_): Caller) -> Result<Json<TemplateList>, Problem> {
    let all = app.templates.clone();
    let names = tokio::task::spawn_blocking(move || all.names())
        .await
        .map_err(|e| Problem::internal("the templates could not be listed", e))?;
    let mut items = Vec::new();
    for name in names {
        match template(&app, &name).await {
            Ok(found) => items.push(document(&found)),
            Err(problem) => tracing::warn!(template = name, %problem, "left out of the list"),
        }
    }
    Ok(Json(TemplateList { items }))
}

/// Look at a template.
#[utoipa::path(
    get, path = "/v1/templates/{name}", tag = "templates",
    params(("name" = String, Path, description = "Name of the template")), security(("key" = [])),
    responses(
        (status = 200, description = "As it is now", body = TemplateDocument),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn get(
    Shared(app): Shared<App>,
    Caller(_): Caller,
    Path(name): Path<String>,
) -> Result<Json<TemplateDocument>, Problem> {
    Ok(Json(document(template(&app, &name).await?.as_ref())))
}
