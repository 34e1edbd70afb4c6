//! The transition function.

use super::state::{Deletion, DeletionReason, Failure, Holds, Reason, Record, State, UnixMs};

/// Something that happened to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The agent has been configured: the machine is usable.
    Usable {
        at: UnixMs,
    },
    /// The machine could not be made.
    CouldNotStart {
        at: UnixMs,
        reason: Reason,
    },
    /// The machine ended by itself, or was ended on the host behind the daemon's back.
    Died {
        at: UnixMs,
        reason: Reason,
    },
    Delete {
        at: UnixMs,
        reason: DeletionReason,
    },
    /// Everything in the scope is gone, and that was checked.
    Released {
        at: UnixMs,
        scope: Scope,
    },
    /// A new daemon has taken over from one that ended.
    TakenOver,
}

/// How much of a sandbox is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// Process, cgroup, disk and sockets; logs and recorded output stay.
    Machine,
    /// All there is, folder included.
    Everything,
}

/// Why the unfinished commands of a sandbox have no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossReason {
    MachineDied,
    SandboxDeleted,
}

/// Effects that are rows, written in the transaction that stores the next state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Journal {
    /// One line in the audit trail.
    Changed {
        state: State,
    },
    LoseCommands(LossReason),
    /// The stop-metering event, with the accepted time however late it is.
    UsageStopped {
        billing_ended_at: UnixMs,
        released_at: UnixMs,
    },
}

/// Effects on the world, carried out once the transaction is durable. All may be carried out again after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum World {
    Boot,
    /// Release whatever an interrupted creation left, then boot.
    Recreate,
    /// Find the machine again; if there is none, that is [`Input::Died`].
    Adopt,
    Release(Scope),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub next: Record,
    pub journal: Vec<Journal>,
    pub world: Vec<World>,
}

impl Step {
    fn unchanged(record: &Record, world: Vec<World>) -> Self {
        Self { next: record.clone(), journal: Vec::new(), world }
    }
}

/// What `input` makes of `record`.
pub fn step(record: &Record, input: &Input) -> Step {
    if let Input::Delete { at, reason } = input {
        return delete(record, *at, *reason);
    }
    if let Some(deletion) = record.deletion {
        return after_delete(record, deletion, input);
    }
    match input {
        Input::Usable { at } => usable(record, *at),
        Input::CouldNotStart { at, reason } => match record.state {
            State::Creating | State::Resuming => fail(record, *at, reason),
            _ => Step::unchanged(record, leftovers(record)),
        },
        Input::Died { at, reason } => match record.state {
            State::Creating | State::Running | State::Suspending | State::Resuming => {
                fail(record, *at, reason)
            }
            _ => Step::unchanged(record, leftovers(record)),
        },
        Input::Released { scope: Scope::Machine, .. } if record.state == State::Failed => {
            let mut next = record.clone();
            next.holds = Holds::Remains;
            Step { next, journal: Vec::new(), world: Vec::new() }
        }
        Input::TakenOver => Step::unchanged(record, taken_over(record)),
        Input::Delete { .. } | Input::Released { .. } => Step::unchanged(record, Vec::new()),
    }
}

fn usable(record: &Record, at: UnixMs) -> Step {
    match record.state {
        State::Creating | State::Resuming => {
            let mut next = record.clone();
            next.state = State::Running;
            next.running_at = record.running_at.or(Some(at));
            next.metered_since = Some(at);
            Step { next, journal: vec![Journal::Changed { state: State::Running }], world: Vec::new() }
        }
        _ => Step::unchanged(record, leftovers(record)),
    }
}

fn fail(record: &Record, at: UnixMs, reason: &Reason) -> Step {
    let mut next = record.clone();
    next.close_meter(at);
    next.state = State::Failed;
    next.failure = Some(Failure { at, reason: reason.clone() });
    Step {
        next,
        journal: vec![
            Journal::LoseCommands(LossReason::MachineDied),
            Journal::Changed { state: State::Failed },
        ],
        world: vec![World::Release(Scope::Machine)],
    }
}

/// A delete is accepted in every state, once; the accepted time is the billing boundary.
fn delete(record: &Record, at: UnixMs, reason: DeletionReason) -> Step {
    if record.deletion.is_some() {
        return Step::unchanged(record, Vec::new());
    }
    let mut next = record.clone();
    next.close_meter(at);
    next.state = State::Deleting;
    next.deletion = Some(Deletion { at, reason });
    Step {
        next,
        journal: vec![
            Journal::LoseCommands(LossReason::SandboxDeleted),
            Journal::Changed { state: State::Deleting },
        ],
        world: vec![World::Release(Scope::Everything)],
    }
}

/// Once a delete is accepted only the release of everything changes anything. A late result of whatever was under way
/// brings nothing back: the work it did is released.
fn after_delete(record: &Record, deletion: Deletion, input: &Input) -> Step {
    if record.released_at.is_some() {
        return match input {
            Input::Usable { .. } => Step::unchanged(record, vec![World::Release(Scope::Everything)]),
            _ => Step::unchanged(record, Vec::new()),
        };
    }
    match input {
        Input::Released { at, scope: Scope::Everything } => {
            let released_at = (*at).max(deletion.at);
            let mut next = record.clone();
            next.state = State::Deleted;
            next.holds = Holds::Nothing;
            next.released_at = Some(released_at);
            let journal = vec![
                Journal::UsageStopped { billing_ended_at: deletion.at, released_at },
                Journal::Changed { state: State::Deleted },
            ];
            Step { next, journal, world: Vec::new() }
        }
        _ => Step::unchanged(record, vec![World::Release(Scope::Everything)]),
    }
}

/// A result came for a sandbox that no longer waits for one. If it has failed, whatever came with the result goes.
fn leftovers(record: &Record) -> Vec<World> {
    if record.state == State::Failed { vec![World::Release(Scope::Machine)] } else { Vec::new() }
}

fn taken_over(record: &Record) -> Vec<World> {
    match (record.state, record.holds) {
        (State::Creating | State::Resuming, _) => vec![World::Recreate],
        (State::Running, _) => vec![World::Adopt],
        (State::Failed, Holds::Machine) => vec![World::Release(Scope::Machine)],
        _ => Vec::new(),
    }
}
