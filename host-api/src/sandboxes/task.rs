//! The task of one sandbox: it owns the machine, and does one thing after the other.

use super::Live;
use super::boot::{self, Outcome, Phases, micros};
use crate::daemon::Daemon;
use crate::lifecycle::{Input, Reason, Scope, World};
use crate::machine::{Machine, MachineEnd, MachineError};
use crate::metrics::Metrics;
use crate::store::{Applied, Details, SandboxRow};
use crate::templates::Template;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// What there is to do. Each is an effect of the lifecycle, or the waiting for its next input.
pub(crate) enum Work {
    Boot(Box<Boot>),
    Recreate,
    Adopt,
    Watch(Machine),
    Release(Scope),
    /// Failed, and the machine's part released: only a delete is left.
    Idle,
}

pub(crate) struct Boot {
    pub template: Arc<Template>,
    /// Folder, disk and cgroup, begun while the row was being written.
    pub prepared: Option<JoinHandle<(Result<(), MachineError>, u64)>>,
    pub accepted: Instant,
    pub phases: Phases,
}

pub(crate) fn start(daemon: Arc<Daemon>, live: Arc<Live>, work: Work) {
    tokio::spawn(async move {
        let mut next = Some(work);
        while let Some(work) = next {
            next = carry_out(&daemon, &live, work).await;
        }
        daemon.forget(&live.id);
    });
}

/// Does one piece of work and says what comes next. None: the sandbox is released.
async fn carry_out(daemon: &Daemon, live: &Live, work: Work) -> Option<Work> {
    match work {
        Work::Boot(work) => Some(create_machine(daemon, live, *work).await),
        Work::Recreate => Some(recreate(daemon, live).await),
        Work::Adopt => Some(adopt(daemon, live).await),
        Work::Watch(machine) => Some(attend(daemon, live, machine).await),
        Work::Release(scope) => release(daemon, live, scope).await,
        Work::Idle => {
            live.deleted().await;
            Some(Work::Release(Scope::Everything))
        }
    }
}

/// Stores what an input makes of the sandbox. What has happened has happened: a store that fails is tried again.
async fn apply(
    daemon: &Daemon,
    live: &Live,
    input: &Input,
    details: impl Fn() -> Details,
) -> Option<Applied> {
    let mut wait = BACKOFF_FIRST;
    loop {
        match daemon.store.apply(live.id.as_str(), input, details()).await {
            Ok(applied) => {
                if let Some(applied) = &applied {
                    live.publish(&applied.row);
                }
                return applied;
            }
            // Somebody may be waiting for this, and it may be what frees room.
            Err(cause) if cause.disk_full() && daemon.reserve.give_up() => {}
            Err(cause) => {
                tracing::error!(sandbox = %live.id, %cause, "a state could not be stored; trying again");
                tokio::time::sleep(wait).await;
                wait = wait.saturating_mul(2).min(BACKOFF_MAX);
            }
        }
    }
}

/// The first effect of a transition, or else what goes on.
pub(crate) fn follow(applied: Option<Applied>, otherwise: Work) -> Work {
    let effect = applied.and_then(|applied| applied.world.first().copied());
    match effect {
        None => otherwise,
        Some(World::Release(scope)) => Work::Release(scope),
        Some(World::Boot | World::Recreate) => Work::Recreate,
        Some(World::Adopt) => Work::Adopt,
    }
}

async fn fail(daemon: &Daemon, live: &Live, reason: Reason, died: bool) -> Work {
    tracing::warn!(sandbox = %live.id, code = reason.code, detail = reason.detail, "sandbox failed");
    let at = daemon.clock.now();
    let input = if died { Input::Died { at, reason } } else { Input::CouldNotStart { at, reason } };
    if !died {
        Metrics::count(&daemon.metrics.creates_failed);
    }
    follow(apply(daemon, live, &input, Details::default).await, Work::Idle)
}

async fn create_machine(daemon: &Daemon, live: &Live, mut work: Boot) -> Work {
    let row = match daemon.store.sandbox(live.id.as_str()).await {
        Ok(Some(row)) => row,
        Ok(None) => return Work::Release(Scope::Everything),
        Err(cause) => return fail(daemon, live, Reason::new("internal", cause.to_string()), false).await,
    };
    // Awaited to its end even if a delete has come: a release must not overtake it.
    let (prepared, took) = match work.prepared.take() {
        Some(begun) => begun.await.unwrap_or_else(|e| {
            (Err(MachineError::Refused(format!("preparing the machine broke off: {e}"))), 0)
        }),
        None => prepare(daemon, &row, &work.template).await,
    };
    work.phases.prepare_us = Some(took);
    if let Err(cause) = prepared {
        return fail(daemon, live, host_reason(&cause), false).await;
    }
    if live.view().deleted {
        return Work::Release(Scope::Everything);
    }
    match boot::boot(daemon, live, &row, &work.template, &mut work.phases).await {
        Outcome::Deleted => Work::Release(Scope::Everything),
        Outcome::Failed(reason) => fail(daemon, live, reason, false).await,
        Outcome::Usable { machine, hello } => {
            work.phases.total_us = Some(micros(work.accepted));
            daemon.metrics.create_ms.observe(work.phases.total_us.unwrap_or(0) / 1_000);
            let phases = serde_json::to_string(&work.phases).ok();
            let details = || Details {
                phases: phases.clone(),
                boot_id: Some(hello.boot_id.clone()),
                ..Details::default()
            };
            let input = Input::Usable { at: daemon.clock.now() };
            follow(apply(daemon, live, &input, details).await, Work::Watch(machine))
        }
    }
}

/// Why the host could not give a machine what it stands on.
fn host_reason(cause: &MachineError) -> Reason {
    match cause {
        MachineError::Io { cause: why, .. } if why.kind() == ErrorKind::StorageFull => {
            Reason::new("host_disk_full", format!("{cause}; make room on the host, then create another"))
        }
        _ => Reason::new("host_error", cause.to_string()),
    }
}

async fn prepare(daemon: &Daemon, row: &SandboxRow, template: &Template) -> (Result<(), MachineError>, u64) {
    let begun = Instant::now();
    let Some(spec) = boot::spec(daemon, row, template) else {
        return (Err(MachineError::Refused("the sandbox's row does not describe a machine".to_owned())), 0);
    };
    (daemon.machines.prepare(&spec).await, micros(begun))
}

/// A creation that an earlier daemon did not finish: whatever it left is released, and it is begun again.
async fn recreate(daemon: &Daemon, live: &Live) -> Work {
    let accepted = Instant::now();
    if let Err(cause) = daemon.machines.release(&live.id, Scope::Machine).await {
        return fail(daemon, live, Reason::new("host_error", cause.to_string()), false).await;
    }
    let template = match daemon.store.sandbox(live.id.as_str()).await {
        Ok(Some(row)) => {
            daemon.templates.get(&row.template).map_err(|e| Reason::new("template_gone", e.to_string()))
        }
        Ok(None) => return Work::Release(Scope::Everything),
        Err(cause) => Err(Reason::new("internal", cause.to_string())),
    };
    match template {
        Ok(template) => {
            Work::Boot(Box::new(Boot { template, prepared: None, accepted, phases: Phases::default() }))
        }
        Err(reason) => fail(daemon, live, reason, false).await,
    }
}

/// Takes up a machine that has run on without a daemon.
async fn adopt(daemon: &Daemon, live: &Live) -> Work {
    let mut machine = match daemon.machines.find(&live.id).await {
        Ok(Some(machine)) => machine,
        Ok(None) => {
            let reason = Reason::new("monitor_gone", "the machine had ended when the daemon started again");
            return fail(daemon, live, reason, true).await;
        }
        Err(cause) => return fail(daemon, live, Reason::new("host_error", cause.to_string()), true).await,
    };
    let known = daemon.store.sandbox(live.id.as_str()).await.ok().flatten().and_then(|row| row.boot_id);
    let pong = tokio::select! {
        pong = daemon.agents.ping(live.cid()) => pong,
        end = machine.ended() => return fail(daemon, live, end.reason(), true).await,
        () = live.deleted() => return Work::Release(Scope::Everything),
    };
    match pong {
        Ok(pong) if known.as_ref().is_some_and(|known| *known != pong.boot_id) => {
            let reason =
                Reason::new("guest_rebooted", "the guest was started again behind the daemon's back");
            fail(daemon, live, reason, true).await
        }
        Ok(_) => {
            tracing::info!(sandbox = %live.id, "taken up again");
            Work::Watch(machine)
        }
        // A guest too busy to answer is not a dead one: its commands go on trying.
        Err(cause) => {
            tracing::warn!(sandbox = %live.id, %cause, "taken up again, but its agent does not answer");
            Work::Watch(machine)
        }
    }
}

async fn attend(daemon: &Daemon, live: &Live, mut machine: Machine) -> Work {
    let end: MachineEnd = tokio::select! {
        end = machine.ended() => end,
        () = live.deleted() => return Work::Release(Scope::Everything),
    };
    fail(daemon, live, end.reason(), true).await
}

/// Releases, and checks, until it is so.
async fn release(daemon: &Daemon, live: &Live, scope: Scope) -> Option<Work> {
    let mut wait = BACKOFF_FIRST;
    let scope = loop {
        let scope = if live.view().deleted { Scope::Everything } else { scope };
        match daemon.machines.release(&live.id, scope).await {
            Ok(()) => break scope,
            Err(cause) => {
                Metrics::count(&daemon.metrics.release_retries);
                tracing::error!(sandbox = %live.id, %cause, "release failed; trying again");
                tokio::time::sleep(wait).await;
                wait = wait.saturating_mul(2).min(BACKOFF_MAX);
            }
        }
    };
    let what = match scope {
        Scope::Machine => "its machine has ended, and what that held is released",
        Scope::Everything => "deleted as asked: its machine has ended, and everything it held is released",
    };
    tracing::info!(sandbox = %live.id, "{what}");
    let input = Input::Released { at: daemon.clock.now(), scope };
    let applied = apply(daemon, live, &input, Details::default).await;
    daemon.admission.free(&live.id);
    keep_reserve(daemon).await;
    match applied {
        None => None,
        Some(applied) if applied.row.released_at.is_some() => None,
        Some(applied) => Some(follow(Some(applied), Work::Idle)),
    }
}

/// There may be room for it again.
async fn keep_reserve(daemon: &Daemon) {
    let reserve = daemon.reserve.clone();
    let _ = tokio::task::spawn_blocking(move || reserve.keep()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_of_the_host_is_a_reason_of_its_own() {
        let io = |kind: ErrorKind| MachineError::io("copying the disk")(kind.into());
        assert_eq!(host_reason(&io(ErrorKind::StorageFull)).code, "host_disk_full");
        assert_eq!(host_reason(&io(ErrorKind::NotFound)).code, "host_error");
        assert_eq!(host_reason(&MachineError::Refused("no".to_owned())).code, "host_error");
    }
}
