//! What a sandbox is at a moment: its state, what the host holds for it, and what it has cost so far.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Milliseconds since 1970-01-01 UTC.
pub type UnixMs = i64;

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Accepted; its machine is being made.
    Creating,
    /// Usable: the agent has answered and commands are taken.
    Running,
    Suspending,
    Suspended,
    Resuming,
    /// The machine died by itself or could not be made. Waits to be deleted.
    Failed,
    /// A delete was accepted; nothing is billed any more, release is under way.
    Deleting,
    /// Everything the host held for it is gone, and that was checked.
    Deleted,
}

impl State {
    pub const ALL: [State; 8] = [
        State::Creating,
        State::Running,
        State::Suspending,
        State::Suspended,
        State::Resuming,
        State::Failed,
        State::Deleting,
        State::Deleted,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            State::Creating => "creating",
            State::Running => "running",
            State::Suspending => "suspending",
            State::Suspended => "suspended",
            State::Resuming => "resuming",
            State::Failed => "failed",
            State::Deleting => "deleting",
            State::Deleted => "deleted",
        }
    }

    pub fn parse(text: &str) -> Option<State> {
        State::ALL.into_iter().find(|state| state.as_str() == text)
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What the host may hold for a sandbox. It is an upper bound: the next release finds out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holds {
    /// A process, a cgroup, a disk, a CID.
    Machine,
    /// Its folder, with logs and recorded output.
    Remains,
    Nothing,
}

impl Holds {
    pub fn as_str(self) -> &'static str {
        match self {
            Holds::Machine => "machine",
            Holds::Remains => "remains",
            Holds::Nothing => "nothing",
        }
    }

    pub fn parse(text: &str) -> Option<Holds> {
        [Holds::Machine, Holds::Remains, Holds::Nothing].into_iter().find(|holds| holds.as_str() == text)
    }
}

/// Why something happened: a stable code for programs, and plain words for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reason {
    pub code: String,
    pub detail: String,
}

impl Reason {
    pub fn new(code: &str, detail: impl Into<String>) -> Self {
        Self { code: code.to_owned(), detail: detail.into() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub at: UnixMs,
    pub reason: Reason,
}

/// Who or what asked for the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeletionReason {
    /// `DELETE` by a caller.
    Request,
    /// `ttl_ms` ran out.
    Ttl,
    IdleTimeout,
    OwnerGone,
}

impl DeletionReason {
    pub fn as_str(self) -> &'static str {
        match self {
            DeletionReason::Request => "request",
            DeletionReason::Ttl => "ttl",
            DeletionReason::IdleTimeout => "idle_timeout",
            DeletionReason::OwnerGone => "owner_gone",
        }
    }

    pub fn parse(text: &str) -> Option<DeletionReason> {
        use DeletionReason::{IdleTimeout, OwnerGone, Request, Ttl};
        [Request, Ttl, IdleTimeout, OwnerGone].into_iter().find(|reason| reason.as_str() == text)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deletion {
    pub at: UnixMs,
    pub reason: DeletionReason,
}

/// Everything that decides a transition, and everything a transition may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub state: State,
    pub holds: Holds,
    pub created_at: UnixMs,
    /// When it first became usable.
    pub running_at: Option<UnixMs>,
    /// Start of the metered interval that is open now; present exactly while `running`.
    pub metered_since: Option<UnixMs>,
    /// Sum of the metered intervals that are closed.
    pub metered_ms: i64,
    pub failure: Option<Failure>,
    pub deletion: Option<Deletion>,
    pub released_at: Option<UnixMs>,
}

impl Record {
    /// A sandbox whose creation was just accepted. The effect that goes with it is [`super::World::Boot`].
    pub fn accepted(at: UnixMs) -> Self {
        Self {
            state: State::Creating,
            holds: Holds::Machine,
            created_at: at,
            running_at: None,
            metered_since: None,
            metered_ms: 0,
            failure: None,
            deletion: None,
            released_at: None,
        }
    }

    /// Time metered up to `now`, in milliseconds. It stands still once the machine has died or a delete was accepted.
    pub fn metered_until(&self, now: UnixMs) -> i64 {
        let open = self.metered_since.map_or(0, |since| now.saturating_sub(since).max(0));
        self.metered_ms.saturating_add(open)
    }

    pub(super) fn close_meter(&mut self, at: UnixMs) {
        self.metered_ms = self.metered_until(at);
        self.metered_since = None;
    }
}
