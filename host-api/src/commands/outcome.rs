//! What the agent says of an end, as it is recorded.

use crate::lifecycle::UnixMs;
use crate::store::{CommandStatus, Finished, LimitHit};
use bivouac_protocol::agent::{Ended, Limit, Outcome, Refusal, StartFailureKind};

/// Longest text of a guest's that is kept, in characters.
const DETAIL: usize = 1_024;

pub fn from_ended(ended: &Ended, at: UnixMs, started_at: Option<UnixMs>) -> Finished {
    let wall_ms = i64::try_from(ended.wall_us / 1_000).unwrap_or(i64::MAX);
    let mut end = Finished {
        status: CommandStatus::Exited,
        at,
        started_at: started_at.or(Some(at.saturating_sub(wall_ms))),
        exit_code: None,
        signal: None,
        termination_reason: None,
        detail: None,
        stdout_bytes: ended.stdout_bytes,
        stderr_bytes: ended.stderr_bytes,
        wall_us: Some(ended.wall_us),
        user_us: Some(ended.user_us),
        system_us: Some(ended.system_us),
        max_rss_kib: Some(ended.max_rss_kib),
        limits_hit: ended.limits_hit.iter().map(limit).collect(),
    };
    let by = |killed: bool| if killed { "ended by KILL after the grace" } else { "ended by TERM" };
    match &ended.outcome {
        Outcome::Exited { code } => end.exit_code = Some(i64::from(*code)),
        Outcome::Signaled { signal, oom_killed } => {
            end.status = CommandStatus::Signaled;
            end.signal = Some(i64::from(*signal));
            if *oom_killed {
                end.termination_reason = Some("oom_killed".to_owned());
                end.detail = Some(
                    "the guest ran out of memory and its kernel ended a process of this command".to_owned(),
                );
            }
        }
        Outcome::TimedOut { killed } => {
            end.status = CommandStatus::TimedOut;
            end.termination_reason = Some("timeout".to_owned());
            end.detail = Some(format!("its timeout passed; {}", by(*killed)));
        }
        Outcome::Canceled { killed } => {
            end.status = CommandStatus::Canceled;
            end.termination_reason = Some("canceled".to_owned());
            end.detail = Some(format!("canceled on request; {}", by(*killed)));
        }
        Outcome::StartFailed(failure) => {
            end.status = CommandStatus::StartFailed;
            end.started_at = None;
            end.termination_reason = Some(kind(failure.kind).to_owned());
            end.detail = Some(failure.detail.chars().take(DETAIL).collect());
            end.limits_hit.extend(limit_of_start(failure.kind));
            return end;
        }
    }
    if end.limits_hit.contains(&LimitHit::Pids) {
        let why = "the guest's kernel refused it a process: it had as many as one command may have at once, or all \
                   commands together had";
        end.detail = Some(end.detail.map_or_else(|| why.to_owned(), |detail| format!("{detail}; {why}")));
    }
    end
}

fn limit(limit: &Limit) -> LimitHit {
    match limit {
        Limit::Memory => LimitHit::Memory,
        Limit::Pids => LimitHit::Pids,
    }
}

/// A start can run out of the same things.
fn limit_of_start(kind: StartFailureKind) -> Option<LimitHit> {
    match kind {
        StartFailureKind::OutOfMemory => Some(LimitHit::Memory),
        StartFailureKind::TooManyProcesses => Some(LimitHit::Pids),
        _ => None,
    }
}

/// A start that the agent refused: nothing ran.
pub fn not_started(refusal: &Refusal, at: UnixMs) -> Finished {
    let (reason, detail) = match refusal {
        Refusal::Busy { detail } => ("guest_busy", detail.clone()),
        Refusal::Invalid { detail } => ("invalid", detail.clone()),
        Refusal::Version { agent } => ("agent_version", format!("the guest's agent speaks version {agent}")),
        other => ("refused", format!("{other:?}")),
    };
    nothing(CommandStatus::StartFailed, reason, detail.chars().take(DETAIL).collect(), at)
}

/// There is no telling any more what became of it.
pub fn lost(reason: &str, detail: &str, at: UnixMs) -> Finished {
    nothing(CommandStatus::Lost, reason, detail.to_owned(), at)
}

fn nothing(status: CommandStatus, reason: &str, detail: String, at: UnixMs) -> Finished {
    Finished {
        status,
        at,
        started_at: None,
        exit_code: None,
        signal: None,
        termination_reason: Some(reason.to_owned()),
        detail: Some(detail),
        stdout_bytes: 0,
        stderr_bytes: 0,
        wall_us: None,
        user_us: None,
        system_us: None,
        max_rss_kib: None,
        limits_hit: Vec::new(),
    }
}

fn kind(kind: StartFailureKind) -> &'static str {
    match kind {
        StartFailureKind::NotFound => "not_found",
        StartFailureKind::NotExecutable => "not_executable",
        StartFailureKind::BadInterpreter => "bad_interpreter",
        StartFailureKind::NoSuchDirectory => "no_such_directory",
        StartFailureKind::DirectoryForbidden => "directory_forbidden",
        StartFailureKind::NoSuchUser => "no_such_user",
        StartFailureKind::OutOfMemory => "out_of_memory",
        StartFailureKind::TooManyProcesses => "too_many_processes",
        StartFailureKind::ArgumentsTooLong => "arguments_too_long",
        StartFailureKind::Other => "other",
    }
}
