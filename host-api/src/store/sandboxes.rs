//! Sandbox rows, and the one place where a state is written.

use super::meta::{next_cid, unknown};
use super::{NewEvent, Result, Store, Tx, commands, events};
use crate::lifecycle::{
    Deletion, DeletionReason, Failure, Holds, Input, Journal, Reason, Record, Scope, State, Step, UnixMs,
    World, step,
};
use serde_json::json;

#[derive(Debug, Clone, sqlx::FromRow)]
pub struct SandboxRow {
    pub seq: i64,
    pub id: String,
    pub org: String,
    pub actor: String,
    pub request_id: Option<String>,
    pub fingerprint: String,
    pub name: Option<String>,
    pub metadata: String,
    pub env: String,
    pub template: String,
    pub template_version: String,
    pub vcpus: i64,
    pub memory_mib: i64,
    pub disk_mib: i64,
    pub ttl_ms: Option<i64>,
    pub expires_at: Option<i64>,
    pub cid: Option<i64>,
    pub boot_id: Option<String>,
    pub state: String,
    pub holds: String,
    pub created_at: i64,
    pub running_at: Option<i64>,
    pub metered_since: Option<i64>,
    pub metered_ms: i64,
    pub failed_at: Option<i64>,
    pub failure_code: Option<String>,
    pub failure_detail: Option<String>,
    pub delete_accepted_at: Option<i64>,
    pub delete_reason: Option<String>,
    pub released_at: Option<i64>,
    pub phases: String,
}

impl SandboxRow {
    pub fn record(&self) -> Result<Record> {
        let state = State::parse(&self.state).ok_or_else(|| unknown("state", &self.state))?;
        let holds = Holds::parse(&self.holds).ok_or_else(|| unknown("holds", &self.holds))?;
        let failure = self.failed_at.map(|at| Failure {
            at,
            reason: Reason::new(
                self.failure_code.as_deref().unwrap_or_default(),
                self.failure_detail.clone().unwrap_or_default(),
            ),
        });
        let deletion = match self.delete_accepted_at {
            None => None,
            Some(at) => {
                let reason = self.delete_reason.as_deref().unwrap_or_default();
                let reason = DeletionReason::parse(reason).ok_or_else(|| unknown("delete reason", reason))?;
                Some(Deletion { at, reason })
            }
        };
        Ok(Record {
            state,
            holds,
            created_at: self.created_at,
            running_at: self.running_at,
            metered_since: self.metered_since,
            metered_ms: self.metered_ms,
            failure,
            deletion,
            released_at: self.released_at,
        })
    }
}

#[derive(Debug, Clone)]
pub struct NewSandbox {
    pub id: String,
    pub org: String,
    pub actor: String,
    pub request_id: Option<String>,
    pub fingerprint: String,
    pub name: Option<String>,
    pub metadata: String,
    pub env: String,
    pub template: String,
    pub template_version: String,
    pub vcpus: u32,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub ttl_ms: Option<i64>,
    pub at: UnixMs,
}

#[derive(Debug)]
pub enum Reserved {
    New(SandboxRow),
    /// The organization has used this request id before; whether for the same request is the caller's to judge.
    Existing(SandboxRow),
}

/// What goes into the row along with a transition.
#[derive(Debug, Clone, Default)]
pub struct Details {
    pub phases: Option<String>,
    pub boot_id: Option<String>,
    /// Only if the life still ends at this time: a renewed life is not ended by an old timer.
    pub if_expires_at: Option<UnixMs>,
    pub actor: Option<String>,
}

#[derive(Debug)]
pub struct Applied {
    pub row: SandboxRow,
    pub world: Vec<World>,
    /// Whether the row changed.
    pub changed: bool,
}

macro_rules! write_state {
    ($guard:literal) => {
        concat!(
            "UPDATE sandboxes SET state = $2, holds = $3, running_at = $4, metered_since = $5, metered_ms = $6, \
             failed_at = $7, failure_code = $8, failure_detail = $9, delete_accepted_at = $10, delete_reason = $11, \
             released_at = $12, cid = CASE WHEN $3 = 'machine' THEN cid ELSE NULL END, \
             phases = COALESCE($13, phases), boot_id = COALESCE($14, boot_id), \
             env = CASE WHEN $10 IS NULL THEN env ELSE '{}' END WHERE id = $1 AND ",
            $guard
        )
    };
}

impl Store {
    /// Makes the row of a new sandbox, with a CID of its own, or returns the one its request id made before.
    pub async fn reserve_sandbox(&self, new: &NewSandbox) -> Result<Reserved> {
        let mut tx = self.write().await?;
        if let Some(request_id) = &new.request_id {
            let known = sqlx::query_as("SELECT * FROM sandboxes WHERE org = $1 AND request_id = $2")
                .bind(&new.org)
                .bind(request_id)
                .fetch_optional(&mut *tx)
                .await?;
            if let Some(row) = known {
                return Ok(Reserved::Existing(row));
            }
        }
        let cid = next_cid(&mut tx).await?;
        let record = Record::accepted(new.at);
        sqlx::query(
            "INSERT INTO sandboxes (id, org, actor, request_id, fingerprint, name, metadata, env, template, \
             template_version, vcpus, memory_mib, disk_mib, ttl_ms, expires_at, cid, state, holds, created_at, \
             metered_ms, phases) VALUES \
             ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, 0, '{}')",
        )
        .bind(&new.id)
        .bind(&new.org)
        .bind(&new.actor)
        .bind(&new.request_id)
        .bind(&new.fingerprint)
        .bind(&new.name)
        .bind(&new.metadata)
        .bind(&new.env)
        .bind(&new.template)
        .bind(&new.template_version)
        .bind(i64::from(new.vcpus))
        .bind(i64::from(new.memory_mib))
        .bind(i64::from(new.disk_mib))
        .bind(new.ttl_ms)
        .bind(new.ttl_ms.map(|ttl| new.at.saturating_add(ttl)))
        .bind(cid)
        .bind(record.state.as_str())
        .bind(record.holds.as_str())
        .bind(record.created_at)
        .execute(&mut *tx)
        .await?;
        let event = NewEvent {
            org: &new.org,
            at: new.at,
            kind: "sandbox.creating",
            actor: &new.actor,
            sandbox_id: Some(&new.id),
            template_version: Some(&new.template_version),
            data: json!({
                "template": new.template, "vcpus": new.vcpus, "memory_mib": new.memory_mib, "disk_mib": new.disk_mib,
                "request_id": new.request_id, "ttl_ms": new.ttl_ms,
            }),
            ..NewEvent::default()
        };
        events::append(&mut tx, event).await?;
        let row = fetch(&mut tx, &new.id).await?.ok_or_else(|| unknown("sandbox", &new.id))?;
        tx.commit().await?;
        Ok(Reserved::New(row))
    }

    /// Puts an input to the lifecycle and stores what comes out, journal and state in one transaction. None: no such
    /// sandbox. The effects on the world are the caller's to carry out, once this has returned.
    pub async fn apply(&self, id: &str, input: &Input, details: Details) -> Result<Option<Applied>> {
        let mut tx = self.write().await?;
        let Some(row) = fetch(&mut tx, id).await? else { return Ok(None) };
        if details.if_expires_at.is_some() && details.if_expires_at != row.expires_at {
            return Ok(Some(Applied { row, world: Vec::new(), changed: false }));
        }
        let record = row.record()?;
        let Step { next, journal, world } = step(&record, input);
        if next == record && journal.is_empty() {
            return Ok(Some(Applied { row, world, changed: false }));
        }
        let failure = next.failure.as_ref();
        let statement = match input {
            Input::Released { scope: Scope::Everything, .. } => {
                write_state!("delete_accepted_at IS NOT NULL AND released_at IS NULL")
            }
            _ => write_state!("delete_accepted_at IS NULL"),
        };
        let written = sqlx::query(statement)
            .bind(id)
            .bind(next.state.as_str())
            .bind(next.holds.as_str())
            .bind(next.running_at)
            .bind(next.metered_since)
            .bind(next.metered_ms)
            .bind(failure.map(|f| f.at))
            .bind(failure.map(|f| f.reason.code.clone()))
            .bind(failure.map(|f| f.reason.detail.clone()))
            .bind(next.deletion.map(|d| d.at))
            .bind(next.deletion.map(|d| d.reason.as_str()))
            .bind(next.released_at)
            .bind(details.phases)
            .bind(details.boot_id)
            .execute(&mut *tx)
            .await?
            .rows_affected();
        if written != 1 {
            // The guard decides, whatever was read before: nothing is written, and the work done is released.
            let row = fetch(&mut tx, id).await?.unwrap_or(row);
            let world = vec![World::Release(Scope::Everything)];
            return Ok(Some(Applied { row, world, changed: false }));
        }
        let actor = details.actor.as_deref().unwrap_or("daemon");
        for entry in journal {
            write_journal(&mut tx, &row, &next, entry, at_of(input), actor).await?;
        }
        let row = fetch(&mut tx, id).await?.unwrap_or(row);
        tx.commit().await?;
        Ok(Some(Applied { row, world, changed: true }))
    }

    /// Gives a sandbox that is still being made another CID, when the host's kernel says its own is taken.
    pub async fn change_cid(&self, id: &str) -> Result<Option<i64>> {
        let mut tx = self.write().await?;
        let cid = next_cid(&mut tx).await?;
        let written = sqlx::query(
            "UPDATE sandboxes SET cid = $2 WHERE id = $1 AND state = 'creating' AND delete_accepted_at IS NULL",
        )
        .bind(id)
        .bind(cid)
        .execute(&mut *tx)
        .await?
        .rows_affected();
        tx.commit().await?;
        Ok((written == 1).then_some(cid))
    }

    pub async fn sandbox(&self, id: &str) -> Result<Option<SandboxRow>> {
        Ok(sqlx::query_as("SELECT * FROM sandboxes WHERE id = $1")
            .bind(id)
            .fetch_optional(&self.reader)
            .await?)
    }

    pub async fn sandbox_by_request(&self, org: &str, request_id: &str) -> Result<Option<SandboxRow>> {
        Ok(sqlx::query_as("SELECT * FROM sandboxes WHERE org = $1 AND request_id = $2")
            .bind(org)
            .bind(request_id)
            .fetch_optional(&self.reader)
            .await?)
    }

    /// Sandboxes of an organization after `after`, in the order they were made. Without a state: all but the deleted.
    pub async fn sandboxes(
        &self,
        org: &str,
        state: Option<&str>,
        after: i64,
        limit: i64,
    ) -> Result<Vec<SandboxRow>> {
        let statement = match state {
            None => {
                "SELECT * FROM sandboxes WHERE org = $1 AND seq > $2 AND ($3 IS NULL AND state <> 'deleted') \
                 ORDER BY seq LIMIT $4"
            }
            Some("all") => {
                "SELECT * FROM sandboxes WHERE org = $1 AND seq > $2 AND $3 = 'all' ORDER BY seq LIMIT $4"
            }
            Some(_) => {
                "SELECT * FROM sandboxes WHERE org = $1 AND seq > $2 AND state = $3 ORDER BY seq LIMIT $4"
            }
        };
        Ok(sqlx::query_as(statement)
            .bind(org)
            .bind(after)
            .bind(state)
            .bind(limit)
            .fetch_all(&self.reader)
            .await?)
    }

    /// Everything the host may still hold something for.
    pub async fn unreleased(&self) -> Result<Vec<SandboxRow>> {
        Ok(sqlx::query_as("SELECT * FROM sandboxes WHERE released_at IS NULL ORDER BY seq")
            .fetch_all(&self.reader)
            .await?)
    }

    pub async fn count_by_state(&self) -> Result<Vec<(String, i64)>> {
        Ok(sqlx::query_as("SELECT state, COUNT(*) FROM sandboxes WHERE released_at IS NULL GROUP BY state")
            .fetch_all(&self.reader)
            .await?)
    }

    /// The lives that have ended by `now`, and the time the next one ends.
    pub async fn expired(&self, now: UnixMs) -> Result<(Vec<(String, UnixMs)>, Option<UnixMs>)> {
        let due = sqlx::query_as(
            "SELECT id, expires_at FROM sandboxes \
             WHERE expires_at IS NOT NULL AND delete_accepted_at IS NULL AND expires_at <= $1 ORDER BY expires_at",
        )
        .bind(now)
        .fetch_all(&self.reader)
        .await?;
        let next = sqlx::query_scalar::<_, Option<i64>>(
            "SELECT MIN(expires_at) FROM sandboxes \
             WHERE expires_at IS NOT NULL AND delete_accepted_at IS NULL AND expires_at > $1",
        )
        .bind(now)
        .fetch_one(&self.reader)
        .await?;
        Ok((due, next))
    }
}

async fn fetch(tx: &mut Tx, id: &str) -> Result<Option<SandboxRow>> {
    Ok(sqlx::query_as("SELECT * FROM sandboxes WHERE id = $1").bind(id).fetch_optional(&mut **tx).await?)
}

fn at_of(input: &Input) -> UnixMs {
    match input {
        Input::Usable { at }
        | Input::CouldNotStart { at, .. }
        | Input::Died { at, .. }
        | Input::Delete { at, .. }
        | Input::Released { at, .. } => *at,
        Input::TakenOver => 0,
    }
}

async fn write_journal(
    tx: &mut Tx,
    row: &SandboxRow,
    next: &Record,
    entry: Journal,
    at: UnixMs,
    actor: &str,
) -> Result<()> {
    let event = NewEvent {
        org: &row.org,
        at,
        actor,
        sandbox_id: Some(&row.id),
        template_version: Some(&row.template_version),
        ..NewEvent::default()
    };
    match entry {
        Journal::LoseCommands(reason) => commands::lose_unfinished(tx, row, reason, at).await?,
        Journal::Changed { state } => {
            let kind = format!("sandbox.{state}");
            let data = json!({
                "reason": next.failure.as_ref().map(|f| &f.reason),
                "delete_reason": next.deletion.map(|d| d.reason),
            });
            events::append(tx, NewEvent { kind: &kind, data, ..event }).await?;
        }
        Journal::UsageStopped { billing_ended_at, released_at } => {
            let data = json!({
                "billing_ended_at": crate::clock::rfc3339(billing_ended_at),
                "released_at": crate::clock::rfc3339(released_at),
                "started_at": next.running_at.map(crate::clock::rfc3339),
                "wall_ms": next.metered_ms,
                "vcpu_ms": next.metered_ms.saturating_mul(row.vcpus),
                "memory_mib_ms": next.metered_ms.saturating_mul(row.memory_mib),
                "disk_mib_ms": next.metered_ms.saturating_mul(row.disk_mib),
            });
            events::append(tx, NewEvent { kind: "usage.stopped", data, ..event }).await?;
        }
    }
    Ok(())
}
