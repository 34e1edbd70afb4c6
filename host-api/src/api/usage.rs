//! `/v1/usage`.

use super::App;
use super::documents::{self, UsageDocument};
use super::extract::{Caller, Params, after, page_size, short};
use super::sandboxes::next_page;
use crate::error::{Code, Problem, ProblemDocument};
use crate::ids::SandboxId;
use axum::Json;
use axum::extract::State as Shared;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
pub struct UsageQuery {
    /// One sandbox. Left out: all that ever were, oldest first.
    sandbox_id: Option<String>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
    /// 1 to 1000; 100 if left out.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
}

#[derive(Debug, Serialize, ToSchema)]
pub struct UsageList {
    pub items: Vec<UsageDocument>,
    /// Where the next page starts; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// What was used. `provisional` until the release is confirmed, `final` from then on.
#[utoipa::path(
    get, path = "/v1/usage", tag = "accounting", params(UsageQuery), security(("key" = [])),
    responses(
        (status = 200, description = "One page", body = UsageList),
        (status = "4XX", description = "Refused", body = ProblemDocument, content_type = "application/problem+json"),
        (status = "5XX", description = "Failed", body = ProblemDocument, content_type = "application/problem+json"),
    )
)]
pub async fn list(
    Shared(app): Shared<App>,
    Caller(caller): Caller,
    Params(query): Params<UsageQuery>,
) -> Result<Json<UsageList>, Problem> {
    let limit = page_size(query.limit)?;
    let after = after(query.cursor.as_deref())?;
    let (rows, next_cursor) = match &query.sandbox_id {
        Some(id) => {
            let missing =
                || Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{}`", short(id)));
            SandboxId::parse(id).ok_or_else(missing)?;
            let row = app.store.sandbox(id).await?.filter(|row| row.org == caller.org).ok_or_else(missing)?;
            (vec![row], None)
        }
        None => {
            let mut rows =
                app.store.sandboxes(&caller.org, Some("all"), after, limit.saturating_add(1)).await?;
            let next_cursor = next_page(&mut rows, limit, |row| row.seq);
            (rows, next_cursor)
        }
    };
    let now = app.clock.now();
    let items = rows.iter().map(|row| documents::usage(row, now)).collect::<Result<_, _>>()?;
    Ok(Json(UsageList { items, next_cursor }))
}
