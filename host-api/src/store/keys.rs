//! API keys. Only the hash of a secret is ever here.

use super::{NewEvent, Result, Store, events};
use crate::lifecycle::UnixMs;

#[derive(Debug, Clone, sqlx::FromRow)]
pub struct KeyRow {
    pub id: String,
    pub org: String,
    pub secret_hash: Vec<u8>,
    pub scopes: String,
    pub expires_at: Option<i64>,
    pub revoked_at: Option<i64>,
}

#[derive(Debug)]
pub struct NewKey<'a> {
    pub id: &'a str,
    pub org: &'a str,
    pub name: &'a str,
    pub secret_hash: &'a [u8],
    pub scopes: &'a str,
    pub at: UnixMs,
}

impl Store {
    pub async fn has_keys(&self) -> Result<bool> {
        let one: Option<i64> =
            sqlx::query_scalar("SELECT 1 FROM keys LIMIT 1").fetch_optional(&self.reader).await?;
        Ok(one.is_some())
    }

    pub async fn key(&self, id: &str) -> Result<Option<KeyRow>> {
        Ok(sqlx::query_as(
            "SELECT id, org, secret_hash, scopes, expires_at, revoked_at FROM keys WHERE id = $1",
        )
        .bind(id)
        .fetch_optional(&self.reader)
        .await?)
    }

    pub async fn add_key(&self, key: &NewKey<'_>) -> Result<()> {
        let mut tx = self.write().await?;
        sqlx::query("INSERT INTO keys (id, org, name, secret_hash, scopes, created_at) VALUES ($1, $2, $3, $4, $5, $6)")
            .bind(key.id)
            .bind(key.org)
            .bind(key.name)
            .bind(key.secret_hash)
            .bind(key.scopes)
            .bind(key.at)
            .execute(&mut *tx)
            .await?;
        let data = serde_json::json!({"key_id": key.id, "name": key.name, "scopes": key.scopes});
        let event = NewEvent {
            org: key.org,
            at: key.at,
            kind: "key.created",
            actor: "daemon",
            data,
            ..NewEvent::default()
        };
        events::append(&mut tx, event).await?;
        tx.commit().await?;
        Ok(())
    }
}
