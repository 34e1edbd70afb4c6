//! The audit trail: one append-only line per thing that happened, in the transaction that made it happen.
//!
//! `hash` is the SHA-256, in hex, of the lines `prev_hash, id, org, at, kind, actor, sandbox_id, command_id,
//! template_version, data` joined by line feeds, an absent one being empty and `data` being the JSON text as stored.
//! `prev_hash` is the hash of the same organization's previous line, empty for its first.

use super::{Result, Store, Tx};
use crate::ids::EventId;
use crate::lifecycle::UnixMs;
use sha2::{Digest, Sha256};

#[derive(Debug, Clone, Default)]
pub struct NewEvent<'a> {
    pub org: &'a str,
    pub at: UnixMs,
    pub kind: &'a str,
    /// Key id, or `daemon`.
    pub actor: &'a str,
    pub sandbox_id: Option<&'a str>,
    pub command_id: Option<&'a str>,
    pub template_version: Option<&'a str>,
    pub data: serde_json::Value,
}

#[derive(Debug, Clone, sqlx::FromRow)]
pub struct EventRow {
    pub seq: i64,
    pub id: String,
    pub org: String,
    pub at: i64,
    pub kind: String,
    pub actor: String,
    pub sandbox_id: Option<String>,
    pub command_id: Option<String>,
    pub template_version: Option<String>,
    pub data: String,
    pub prev_hash: String,
    pub hash: String,
}

/// The hash that goes with a line.
pub fn link(row: &EventRow) -> String {
    let at = row.at.to_string();
    let parts = [
        row.prev_hash.as_str(),
        &row.id,
        &row.org,
        &at,
        &row.kind,
        &row.actor,
        row.sandbox_id.as_deref().unwrap_or_default(),
        row.command_id.as_deref().unwrap_or_default(),
        row.template_version.as_deref().unwrap_or_default(),
        &row.data,
    ];
    crate::auth::hex(&Sha256::digest(parts.join("\n").as_bytes()))
}

pub(super) async fn append(tx: &mut Tx, event: NewEvent<'_>) -> Result<String> {
    let prev_hash =
        sqlx::query_scalar::<_, String>("SELECT hash FROM events WHERE org = $1 ORDER BY seq DESC LIMIT 1")
            .bind(event.org)
            .fetch_optional(&mut **tx)
            .await?
            .unwrap_or_default();
    let mut row = EventRow {
        seq: 0,
        id: EventId::new().to_string(),
        org: event.org.to_owned(),
        at: event.at,
        kind: event.kind.to_owned(),
        actor: event.actor.to_owned(),
        sandbox_id: event.sandbox_id.map(str::to_owned),
        command_id: event.command_id.map(str::to_owned),
        template_version: event.template_version.map(str::to_owned),
        data: event.data.to_string(),
        prev_hash,
        hash: String::new(),
    };
    row.hash = link(&row);
    sqlx::query(
        "INSERT INTO events (id, org, at, kind, actor, sandbox_id, command_id, template_version, data, prev_hash, hash) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
    )
    .bind(&row.id)
    .bind(&row.org)
    .bind(row.at)
    .bind(&row.kind)
    .bind(&row.actor)
    .bind(&row.sandbox_id)
    .bind(&row.command_id)
    .bind(&row.template_version)
    .bind(&row.data)
    .bind(&row.prev_hash)
    .bind(&row.hash)
    .execute(&mut **tx)
    .await?;
    Ok(row.id)
}

impl Store {
    /// One line on its own, for what has no row to change.
    pub async fn record(&self, event: NewEvent<'_>) -> Result<()> {
        let mut tx = self.write().await?;
        append(&mut tx, event).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Lines of an organization after `after`, oldest first.
    pub async fn events(
        &self,
        org: &str,
        sandbox: Option<&str>,
        after: i64,
        limit: i64,
    ) -> Result<Vec<EventRow>> {
        Ok(sqlx::query_as(
            "SELECT * FROM events WHERE org = $1 AND seq > $2 AND ($3 IS NULL OR sandbox_id = $3) ORDER BY seq LIMIT $4",
        )
        .bind(org)
        .bind(after)
        .bind(sandbox)
        .bind(limit)
        .fetch_all(&self.reader)
        .await?)
    }
}
