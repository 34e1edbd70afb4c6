//! The first thing a daemon does: what the store says against what the host has, both ways.
//!
//! Machines that live are taken up again, with every command they were running; creations cut short are begun again;
//! releases cut short go on; whatever the host holds in this daemon's own places for no sandbox of the store is
//! released. It looks in those places only: this data directory, and this instance's cgroups.

use crate::commands;
use crate::daemon::Daemon;
use crate::ids::SandboxId;
use crate::lifecycle::{Holds, Input, Scope, World};
use crate::machine::{MachineError, real};
use crate::sandboxes::{Live, Work, follow, start};
use crate::store::{Details, SandboxRow, StoreError};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Machine(#[from] MachineError),
}

/// Takes over from the daemon before. When this returns every sandbox that lives can be asked for and waited for; what
/// takes longer goes on in the sandboxes' own tasks.
pub async fn take_over(daemon: &Arc<Daemon>) -> Result<(), ReconcileError> {
    let rows = daemon.store.unreleased().await?;
    // Asked before any task starts: nothing of this daemon's own making is among them.
    let mut orphans: BTreeSet<SandboxId> = daemon.machines.survey().await?;
    let mut lives = Vec::new();
    for row in rows {
        let Some(id) = SandboxId::parse(&row.id) else {
            tracing::error!(sandbox = row.id, "a row with an id of another form is left alone");
            continue;
        };
        orphans.remove(&id);
        let live = Arc::new(Live::new(id));
        live.publish(&row);
        daemon.keep(Arc::clone(&live));
        lives.push((live, row));
    }
    for (live, row) in lives {
        take_up(daemon, live, &row).await?;
    }
    for id in orphans {
        tracing::warn!(sandbox = %id, "the host holds something for it and the store does not know it: released");
        tokio::spawn(release_orphan(Arc::clone(daemon), id));
    }
    Ok(())
}

async fn take_up(daemon: &Arc<Daemon>, live: Arc<Live>, row: &SandboxRow) -> Result<(), ReconcileError> {
    let record = row.record()?;
    if record.holds == Holds::Machine {
        let mib = u32::try_from(row.memory_mib).unwrap_or(u32::MAX);
        daemon.admission.take_over(&live.id, real::memory_cost_mib(mib));
    }
    let applied = daemon.store.apply(&row.id, &Input::TakenOver, Details::default()).await?;
    if applied.as_ref().is_some_and(|applied| applied.world.contains(&World::Adopt)) {
        for command in daemon.store.unfinished_commands(&row.id).await? {
            commands::settle(Arc::clone(daemon), Arc::clone(&live), command);
        }
    }
    start(Arc::clone(daemon), live, follow(applied, Work::Idle));
    Ok(())
}

async fn release_orphan(daemon: Arc<Daemon>, id: SandboxId) {
    let mut wait = Duration::from_millis(100);
    while let Err(cause) = daemon.machines.release(&id, Scope::Everything).await {
        tracing::error!(sandbox = %id, %cause, "an orphan could not be released; trying again");
        tokio::time::sleep(wait).await;
        wait = wait.saturating_mul(2).min(Duration::from_secs(30));
    }
}
