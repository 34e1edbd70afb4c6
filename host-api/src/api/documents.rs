//! The documents callers read, made from rows.

use crate::clock::rfc3339;
use crate::commands::{Kept, StreamName};
use crate::error::Problem;
use crate::lifecycle::{DeletionReason, Reason, State, UnixMs};
use crate::sandboxes::Phases;
use crate::store::{CommandRow, CommandStatus, EventRow, LimitHit, SandboxRow};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// RFC 3339, UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ToSchema)]
#[schema(value_type = String, format = DateTime, example = "2026-11-29T16:00:00.000Z")]
pub struct Time(pub UnixMs);

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&rfc3339(self.0))
    }
}

/// One machine.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct SandboxDocument {
    #[schema(example = "sb_01jdw3vq5zj9b7m3t0c1h2k4n6")]
    pub id: String,
    pub state: State,
    /// Why it failed; present exactly for a sandbox that has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub metadata: BTreeMap<String, String>,
    pub template: String,
    /// The version it was cut from, which it keeps.
    pub template_version: String,
    pub vcpus: i64,
    pub memory_mib: i64,
    /// Size of its own disk; at least what was asked for.
    pub disk_mib: i64,
    pub created_at: Time,
    /// When it first became usable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running_at: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_at: Option<Time>,
    /// When its time to live runs out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delete_accepted_at: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delete_reason: Option<DeletionReason>,
    /// When everything the host held for it was seen to be gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub released_at: Option<Time>,
    pub phases: Phases,
    pub usage: UsageDocument,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum UsageState {
    /// It may still change, or its release is not confirmed.
    Provisional,
    Final,
}

/// What a sandbox has used. Metered while it runs; the accepted delete ends it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct UsageDocument {
    pub sandbox_id: String,
    pub state: UsageState,
    /// When it became usable, which is when metering starts.
    pub started_at: Option<Time>,
    pub delete_accepted_at: Option<Time>,
    /// The billing boundary: the accepted delete, however late the release is.
    pub billing_ended_at: Option<Time>,
    pub released_at: Option<Time>,
    pub wall_ms: i64,
    pub vcpu_ms: i64,
    pub memory_mib_ms: i64,
    pub disk_mib_ms: i64,
}

pub fn usage(row: &SandboxRow, now: UnixMs) -> Result<UsageDocument, Problem> {
    let wall_ms = row.record()?.metered_until(now);
    Ok(UsageDocument {
        sandbox_id: row.id.clone(),
        state: if row.released_at.is_some() { UsageState::Final } else { UsageState::Provisional },
        started_at: row.running_at.map(Time),
        delete_accepted_at: row.delete_accepted_at.map(Time),
        billing_ended_at: row.delete_accepted_at.map(Time),
        released_at: row.released_at.map(Time),
        wall_ms,
        vcpu_ms: wall_ms.saturating_mul(row.vcpus),
        memory_mib_ms: wall_ms.saturating_mul(row.memory_mib),
        disk_mib_ms: wall_ms.saturating_mul(row.disk_mib),
    })
}

pub fn sandbox(row: &SandboxRow, now: UnixMs) -> Result<SandboxDocument, Problem> {
    let record = row.record()?;
    Ok(SandboxDocument {
        id: row.id.clone(),
        state: record.state,
        reason: record.failure.map(|failure| failure.reason),
        name: row.name.clone(),
        metadata: serde_json::from_str(&row.metadata).unwrap_or_default(),
        template: row.template.clone(),
        template_version: row.template_version.clone(),
        vcpus: row.vcpus,
        memory_mib: row.memory_mib,
        disk_mib: row.disk_mib,
        created_at: Time(row.created_at),
        running_at: row.running_at.map(Time),
        failed_at: row.failed_at.map(Time),
        expires_at: row.expires_at.map(Time),
        delete_accepted_at: row.delete_accepted_at.map(Time),
        delete_reason: record.deletion.map(|deletion| deletion.reason),
        released_at: row.released_at.map(Time),
        phases: serde_json::from_str(&row.phases).unwrap_or_default(),
        usage: usage(row, now)?,
    })
}

/// A delete that is on disk. The same for every delete of one sandbox.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct DeleteDocument {
    pub id: String,
    pub delete_accepted_at: Time,
    pub delete_reason: DeletionReason,
    pub billing_ended_at: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub enum Encoding {
    #[serde(rename = "utf-8")]
    Utf8,
    #[serde(rename = "base64")]
    Base64,
}

/// One output stream. Nothing is dropped silently: what is not here is counted.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct OutputDocument {
    pub encoding: Encoding,
    /// The bytes, where they are valid UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The bytes in base64, where they are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// What the command wrote, whatever was kept of it.
    pub bytes_total: u64,
    /// Whether this document lacks any of it: head and tail are here, one after the other.
    pub truncated: bool,
    /// Where in the bytes above something is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_at: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_bytes: Option<u64>,
    /// Bytes that were recorded and can be read at `/output`; fewer than `bytes_total` past the output limit.
    pub bytes_kept: u64,
}

fn len(data: &[u8]) -> u64 {
    u64::try_from(data.len()).unwrap_or(u64::MAX)
}

pub fn output(kept: Kept, bytes_total: Option<i64>) -> OutputDocument {
    let told = bytes_total.and_then(|n| u64::try_from(n).ok()).unwrap_or(0);
    let total = kept.extent.total.max(told);
    let bytes_kept = kept.extent.total.saturating_sub(kept.extent.dropped());
    let Kept { mut head, mut tail, .. } = kept;
    let whole = len(&head).saturating_add(len(&tail)) >= total;
    if !whole {
        trim_to_characters(&mut head, &mut tail);
    }
    let omitted_at = len(&head);
    head.append(&mut tail);
    let shown = len(&head);
    let (encoding, text, data) = match String::from_utf8(head) {
        Ok(text) => (Encoding::Utf8, Some(text), None),
        Err(bytes) => (Encoding::Base64, None, Some(STANDARD.encode(bytes.as_bytes()))),
    };
    OutputDocument {
        encoding,
        text,
        data,
        bytes_total: total,
        truncated: !whole,
        omitted_at: (!whole).then_some(omitted_at),
        omitted_bytes: (!whole).then_some(total.saturating_sub(shown)),
        bytes_kept,
    }
}

/// A cut through a character makes text look binary: up to three bytes on either side of the gap go to it instead.
fn trim_to_characters(head: &mut Vec<u8>, tail: &mut Vec<u8>) {
    let head_ok = match std::str::from_utf8(head) {
        Ok(_) => Some(head.len()),
        Err(e) if e.error_len().is_none() => Some(e.valid_up_to()),
        Err(_) => None,
    };
    let skip = tail.iter().take(3).take_while(|byte| **byte & 0xC0 == 0x80).count();
    let tail_ok = tail.get(skip..).is_some_and(|rest| std::str::from_utf8(rest).is_ok());
    if let (Some(end), true) = (head_ok, tail_ok) {
        head.truncate(end);
        tail.drain(..skip);
    }
}

/// One run of a program.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct CommandDocument {
    #[schema(example = "cmd_01jdw3vq5zj9b7m3t0c1h2k4n6")]
    pub id: String,
    pub sandbox_id: String,
    pub request_id: String,
    pub status: CommandStatus,
    pub argv: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<i64>,
    pub output_limit_bytes: i64,
    pub background: bool,
    /// Present exactly for `exited`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
    /// Present exactly for `signaled`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i64>,
    /// Why it ended otherwise: `timeout`, `canceled`, `oom_killed`, `machine_died`, `sandbox_deleted`, or why it could
    /// not start: `not_found`, `not_executable`, `bad_interpreter`, `no_such_directory`,
    /// `directory_forbidden`, `no_such_user`, `out_of_memory`, `too_many_processes`, `arguments_too_long`, `invalid`, `guest_busy`, `other`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub termination_reason: Option<String>,
    /// What it ran out of, whichever way it ended; left out where that is nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub limits_hit: Vec<LimitHit>,
    /// The reason in plain words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    pub accepted_at: Time,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<Time>,
    /// From its start to its leader's end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wall_us: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_us: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_us: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_rss_kib: Option<i64>,
    /// Left out in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdout: Option<OutputDocument>,
    /// Left out in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stderr: Option<OutputDocument>,
}

pub fn command(row: &CommandRow, streams: Option<(Kept, Kept)>) -> Result<CommandDocument, Problem> {
    let (stdout, stderr) = streams.unzip();
    Ok(CommandDocument {
        id: row.id.clone(),
        sandbox_id: row.sandbox_id.clone(),
        request_id: row.request_id.clone(),
        status: row.status()?,
        argv: serde_json::from_str(&row.argv).unwrap_or_default(),
        cwd: row.cwd.clone(),
        user: row.user_name.clone(),
        timeout_ms: row.timeout_ms,
        output_limit_bytes: row.output_limit_bytes,
        background: row.background != 0,
        exit_code: row.exit_code,
        signal: row.signal,
        termination_reason: row.termination_reason.clone(),
        limits_hit: row.limits_hit()?,
        detail: row.detail.clone(),
        accepted_at: Time(row.accepted_at),
        started_at: row.started_at.map(Time),
        ended_at: row.ended_at.map(Time),
        wall_us: row.wall_us,
        user_us: row.user_us,
        system_us: row.system_us,
        max_rss_kib: row.max_rss_kib,
        stdout: stdout.map(|kept| output(kept, row.stdout_bytes)),
        stderr: stderr.map(|kept| output(kept, row.stderr_bytes)),
    })
}

/// One line of the audit trail.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct EventDocument {
    pub id: String,
    pub at: Time,
    /// The same in milliseconds since 1970, which is what the hash is over.
    pub at_ms: i64,
    #[schema(example = "usage.stopped")]
    pub kind: String,
    pub org: String,
    /// Id of the key, or `daemon`.
    pub actor: String,
    pub sandbox_id: Option<String>,
    pub command_id: Option<String>,
    pub template_version: Option<String>,
    #[schema(value_type = Object)]
    pub data: serde_json::Value,
    /// Hash of the organization's previous line; empty for its first.
    pub prev_hash: String,
    /// SHA-256, in hex, of prev_hash, id, org, at_ms, kind, actor, sandbox_id, command_id, template_version and data (as
    /// compact JSON with sorted keys), joined by line feeds, an absent one being empty.
    pub hash: String,
}

pub fn event(row: EventRow) -> EventDocument {
    EventDocument {
        id: row.id,
        at: Time(row.at),
        at_ms: row.at,
        kind: row.kind,
        org: row.org,
        actor: row.actor,
        sandbox_id: row.sandbox_id,
        command_id: row.command_id,
        template_version: row.template_version,
        data: serde_json::from_str(&row.data).unwrap_or_default(),
        prev_hash: row.prev_hash,
        hash: row.hash,
    }
}

/// Bytes of one stream, as the events of a stream carry them.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ChunkDocument {
    pub stream: StreamName,
    /// Absolute offset of the first byte.
    pub offset: u64,
    pub encoding: Encoding,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
}

pub fn chunk(stream: StreamName, offset: u64, bytes: Vec<u8>) -> ChunkDocument {
    // Zero bytes are valid UTF-8, but nobody's text, and each takes six characters of JSON.
    let text =
        if bytes.contains(&0) { Err(bytes) } else { String::from_utf8(bytes).map_err(|e| e.into_bytes()) };
    match text {
        Ok(text) => ChunkDocument { stream, offset, encoding: Encoding::Utf8, text: Some(text), data: None },
        Err(bytes) => {
            let data = Some(STANDARD.encode(bytes));
            ChunkDocument { stream, offset, encoding: Encoding::Base64, text: None, data }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spool::Extent;

    fn kept(head: &[u8], tail: &[u8], total: u64) -> Kept {
        let extent = Extent { total, head_end: len(head), tail_start: total - len(tail) };
        Kept { extent, head: head.to_vec(), tail: tail.to_vec() }
    }

    #[test]
    fn text_is_text_and_binary_is_base64_byte_for_byte() {
        assert_eq!(output(kept("grüß".as_bytes(), b"", 6), None).text.as_deref(), Some("grüß"));
        let binary = output(kept(&[0xff, 0x00], b"", 2), None);
        assert_eq!((binary.data.as_deref(), binary.text), (Some("/wA="), None));
    }

    #[test]
    fn a_cut_through_a_character_stays_text_and_every_byte_is_counted() {
        let (head, tail) = ("ab€".as_bytes(), "€cd".as_bytes());
        let document = output(kept(&head[..4], &tail[1..], 100), None);
        assert_eq!(document.text.as_deref(), Some("abcd"));
        assert_eq!(
            (document.omitted_at, document.omitted_bytes, document.truncated),
            (Some(2), Some(96), true)
        );
    }
}
