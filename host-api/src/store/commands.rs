//! Command rows: accepted once per request id, ended once.

use super::meta::unknown;
use super::{NewEvent, Result, SandboxRow, Store, Tx, events};
use crate::lifecycle::{LossReason, State, UnixMs};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

/// Where a command is. `accepted` and `running` are followed by exactly one of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandStatus {
    Accepted,
    Running,
    Exited,
    Signaled,
    TimedOut,
    Canceled,
    StartFailed,
    Lost,
}

impl CommandStatus {
    pub const ALL: [CommandStatus; 8] = [
        CommandStatus::Accepted,
        CommandStatus::Running,
        CommandStatus::Exited,
        CommandStatus::Signaled,
        CommandStatus::TimedOut,
        CommandStatus::Canceled,
        CommandStatus::StartFailed,
        CommandStatus::Lost,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            CommandStatus::Accepted => "accepted",
            CommandStatus::Running => "running",
            CommandStatus::Exited => "exited",
            CommandStatus::Signaled => "signaled",
            CommandStatus::TimedOut => "timed_out",
            CommandStatus::Canceled => "canceled",
            CommandStatus::StartFailed => "start_failed",
            CommandStatus::Lost => "lost",
        }
    }

    pub fn parse(text: &str) -> Option<CommandStatus> {
        CommandStatus::ALL.into_iter().find(|status| status.as_str() == text)
    }

    pub fn ended(self) -> bool {
        !matches!(self, CommandStatus::Accepted | CommandStatus::Running)
    }
}

/// What a command ran out of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LimitHit {
    /// The guest's kernel ended a process of it for want of memory.
    Memory,
    /// The guest's kernel refused it a process or thread.
    Pids,
}

#[derive(Debug, Clone, sqlx::FromRow)]
pub struct CommandRow {
    pub seq: i64,
    pub id: String,
    pub sandbox_id: String,
    pub org: String,
    pub actor: String,
    pub request_id: String,
    pub fingerprint: String,
    pub argv: String,
    pub cwd: Option<String>,
    pub env: Option<String>,
    pub user_name: Option<String>,
    pub stdin: Option<Vec<u8>>,
    pub timeout_ms: Option<i64>,
    pub output_limit_bytes: i64,
    pub background: i64,
    pub status: String,
    pub accepted_at: i64,
    pub started_at: Option<i64>,
    pub ended_at: Option<i64>,
    pub exit_code: Option<i64>,
    pub signal: Option<i64>,
    pub termination_reason: Option<String>,
    pub detail: Option<String>,
    pub stdout_bytes: Option<i64>,
    pub stderr_bytes: Option<i64>,
    pub wall_us: Option<i64>,
    pub user_us: Option<i64>,
    pub system_us: Option<i64>,
    pub max_rss_kib: Option<i64>,
    /// JSON list of [`LimitHit`].
    pub limits_hit: Option<String>,
}

impl CommandRow {
    pub fn limits_hit(&self) -> Result<Vec<LimitHit>> {
        match &self.limits_hit {
            None => Ok(Vec::new()),
            Some(text) => serde_json::from_str(text).map_err(|_| unknown("limits_hit", text)),
        }
    }

    pub fn status(&self) -> Result<CommandStatus> {
        CommandStatus::parse(&self.status).ok_or_else(|| unknown("status", &self.status))
    }
}

#[derive(Debug, Clone)]
pub struct NewCommand {
    pub id: String,
    pub sandbox_id: String,
    pub org: String,
    pub actor: String,
    pub request_id: String,
    pub fingerprint: String,
    pub argv: String,
    pub cwd: Option<String>,
    pub env: String,
    pub user: Option<String>,
    pub stdin: Vec<u8>,
    pub timeout_ms: Option<i64>,
    pub output_limit_bytes: u64,
    pub background: bool,
    pub at: UnixMs,
}

#[derive(Debug)]
pub enum Accepted {
    New(CommandRow),
    /// The request id was used in this sandbox before; whether for the same request is the caller's to judge.
    Existing(CommandRow),
    /// The sandbox is in a state, this one, in which it takes no commands; nothing was written.
    NotRunning(State),
    /// As many commands as may be are unfinished; nothing was written.
    TooMany,
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    pub status: CommandStatus,
    pub at: UnixMs,
    pub started_at: Option<UnixMs>,
    pub exit_code: Option<i64>,
    pub signal: Option<i64>,
    pub termination_reason: Option<String>,
    pub detail: Option<String>,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    pub wall_us: Option<u64>,
    pub user_us: Option<u64>,
    pub system_us: Option<u64>,
    pub max_rss_kib: Option<u64>,
    pub limits_hit: Vec<LimitHit>,
}

fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Store {
    /// Makes the row of a new command if its sandbox takes commands, or returns the one its request id made before.
    pub async fn accept_command(&self, new: &NewCommand, unfinished_max: i64) -> Result<Accepted> {
        let mut tx = self.write().await?;
        let known = sqlx::query_as("SELECT * FROM commands WHERE sandbox_id = $1 AND request_id = $2")
            .bind(&new.sandbox_id)
            .bind(&new.request_id)
            .fetch_optional(&mut *tx)
            .await?;
        if let Some(row) = known {
            return Ok(Accepted::Existing(row));
        }
        let unfinished: i64 = sqlx::query_scalar(
            "SELECT COUNT(*) FROM commands WHERE sandbox_id = $1 AND status IN ('accepted', 'running')",
        )
        .bind(&new.sandbox_id)
        .fetch_one(&mut *tx)
        .await?;
        if unfinished >= unfinished_max {
            return Ok(Accepted::TooMany);
        }
        let row: Option<CommandRow> = sqlx::query_as(
            "INSERT INTO commands (id, sandbox_id, org, actor, request_id, fingerprint, argv, cwd, env, user_name, \
             stdin, timeout_ms, output_limit_bytes, background, status, accepted_at) \
             SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, 'accepted', $15 \
             FROM sandboxes WHERE id = $2 AND state = 'running' AND delete_accepted_at IS NULL RETURNING *",
        )
        .bind(&new.id)
        .bind(&new.sandbox_id)
        .bind(&new.org)
        .bind(&new.actor)
        .bind(&new.request_id)
        .bind(&new.fingerprint)
        .bind(&new.argv)
        .bind(&new.cwd)
        .bind(&new.env)
        .bind(&new.user)
        .bind((!new.stdin.is_empty()).then_some(new.stdin.as_slice()))
        .bind(new.timeout_ms)
        .bind(int(new.output_limit_bytes))
        .bind(i64::from(new.background))
        .bind(new.at)
        .fetch_optional(&mut *tx)
        .await?;
        let Some(row) = row else {
            let state: Option<String> = sqlx::query_scalar("SELECT state FROM sandboxes WHERE id = $1")
                .bind(&new.sandbox_id)
                .fetch_optional(&mut *tx)
                .await?;
            let state = state.as_deref().map_or(Some(State::Deleted), State::parse);
            return Ok(Accepted::NotRunning(state.ok_or_else(|| unknown("state", &new.sandbox_id))?));
        };
        let event = NewEvent {
            org: &row.org,
            at: row.accepted_at,
            kind: "command.accepted",
            actor: &row.actor,
            sandbox_id: Some(&row.sandbox_id),
            command_id: Some(&row.id),
            data: json!({"request_id": row.request_id, "argv": row.argv, "user": row.user_name, "cwd": row.cwd}),
            ..NewEvent::default()
        };
        events::append(&mut tx, event).await?;
        tx.commit().await?;
        Ok(Accepted::New(row))
    }

    /// Says that the agent has started it. Of no consequence to what happens after a crash: the agent is asked then.
    pub async fn command_started(&self, id: &str, at: UnixMs) -> Result<()> {
        sqlx::query(
            "UPDATE commands SET status = 'running', started_at = $2 WHERE id = $1 AND status = 'accepted'",
        )
        .bind(id)
        .bind(at)
        .execute(&self.writer)
        .await?;
        Ok(())
    }

    /// Records the end, once: false if another end was recorded before.
    pub async fn finish_command(&self, id: &str, end: &Finished) -> Result<bool> {
        let mut tx = self.write().await?;
        let row: Option<CommandRow> = sqlx::query_as(
            "UPDATE commands SET status = $2, ended_at = $3, started_at = COALESCE(started_at, $4), exit_code = $5, \
             signal = $6, termination_reason = $7, detail = $8, stdout_bytes = $9, stderr_bytes = $10, wall_us = $11, \
             user_us = $12, system_us = $13, max_rss_kib = $14, limits_hit = $15, env = NULL, stdin = NULL \
             WHERE id = $1 AND status IN ('accepted', 'running') RETURNING *",
        )
        .bind(id)
        .bind(end.status.as_str())
        .bind(end.at)
        .bind(end.started_at)
        .bind(end.exit_code)
        .bind(end.signal)
        .bind(&end.termination_reason)
        .bind(&end.detail)
        .bind(int(end.stdout_bytes))
        .bind(int(end.stderr_bytes))
        .bind(end.wall_us.map(int))
        .bind(end.user_us.map(int))
        .bind(end.system_us.map(int))
        .bind(end.max_rss_kib.map(int))
        .bind((!end.limits_hit.is_empty()).then(|| json!(end.limits_hit).to_string()))
        .fetch_optional(&mut *tx)
        .await?;
        let Some(row) = row else { return Ok(false) };
        ended_event(&mut tx, &row, end.at).await?;
        tx.commit().await?;
        Ok(true)
    }

    pub async fn command(&self, sandbox_id: &str, id: &str) -> Result<Option<CommandRow>> {
        Ok(sqlx::query_as("SELECT * FROM commands WHERE sandbox_id = $1 AND id = $2")
            .bind(sandbox_id)
            .bind(id)
            .fetch_optional(&self.reader)
            .await?)
    }

    pub async fn command_by_request(&self, sandbox_id: &str, request_id: &str) -> Result<Option<CommandRow>> {
        Ok(sqlx::query_as("SELECT * FROM commands WHERE sandbox_id = $1 AND request_id = $2")
            .bind(sandbox_id)
            .bind(request_id)
            .fetch_optional(&self.reader)
            .await?)
    }

    pub async fn commands(&self, sandbox_id: &str, after: i64, limit: i64) -> Result<Vec<CommandRow>> {
        Ok(sqlx::query_as("SELECT * FROM commands WHERE sandbox_id = $1 AND seq > $2 ORDER BY seq LIMIT $3")
            .bind(sandbox_id)
            .bind(after)
            .bind(limit)
            .fetch_all(&self.reader)
            .await?)
    }

    pub async fn unfinished_commands(&self, sandbox_id: &str) -> Result<Vec<CommandRow>> {
        Ok(sqlx::query_as(
            "SELECT * FROM commands WHERE sandbox_id = $1 AND status IN ('accepted', 'running') ORDER BY seq",
        )
        .bind(sandbox_id)
        .fetch_all(&self.reader)
        .await?)
    }
}

pub(super) async fn lose_unfinished(
    tx: &mut Tx,
    sandbox: &SandboxRow,
    why: LossReason,
    at: UnixMs,
) -> Result<()> {
    let (reason, detail) = match why {
        LossReason::MachineDied => ("machine_died", "the sandbox's machine ended before the command did"),
        LossReason::SandboxDeleted => ("sandbox_deleted", "the sandbox was deleted before the command ended"),
    };
    let lost: Vec<CommandRow> = sqlx::query_as(
        "UPDATE commands SET status = 'lost', ended_at = $2, termination_reason = $3, detail = $4, env = NULL, \
         stdin = NULL WHERE sandbox_id = $1 AND status IN ('accepted', 'running') RETURNING *",
    )
    .bind(&sandbox.id)
    .bind(at)
    .bind(reason)
    .bind(detail)
    .fetch_all(&mut **tx)
    .await?;
    for row in &lost {
        ended_event(tx, row, at).await?;
    }
    Ok(())
}

async fn ended_event(tx: &mut Tx, row: &CommandRow, at: UnixMs) -> Result<()> {
    let event = NewEvent {
        org: &row.org,
        at,
        kind: "command.ended",
        actor: "daemon",
        sandbox_id: Some(&row.sandbox_id),
        command_id: Some(&row.id),
        data: json!({
            "status": row.status, "exit_code": row.exit_code, "signal": row.signal,
            "termination_reason": row.termination_reason, "limits_hit": row.limits_hit()?,
        }),
        ..NewEvent::default()
    };
    events::append(tx, event).await?;
    Ok(())
}
