//! Accepting a command, and waiting for it.

use super::{Progress, drive};
use crate::daemon::Daemon;
use crate::error::{Code, Problem};
use crate::lifecycle::State;
use crate::limits;
use crate::metrics::Metrics;
use crate::sandboxes::Live;
use crate::store::{Accepted, CommandRow, NewCommand};
use bivouac_protocol::agent::{DRAIN_MS, TERM_GRACE_MS};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Commands of one sandbox that may be unfinished at once.
const UNFINISHED_MAX: i64 = 1_024;

/// A command that was asked for, checked.
pub type Submission = NewCommand;

#[derive(Debug)]
pub struct Submitted {
    pub row: CommandRow,
    /// The request id had made it before.
    pub replayed: bool,
}

/// Accepts a command and starts driving it, or finds the one that the request id stands for. `live` is None for a
/// sandbox that is released: then only an old command can be found.
pub async fn submit(
    daemon: &Arc<Daemon>,
    live: Option<Arc<Live>>,
    new: NewCommand,
) -> Result<Submitted, Problem> {
    let Some(live) = live else {
        return match daemon.store.command_by_request(&new.sandbox_id, &new.request_id).await? {
            Some(row) => same(daemon, row, &new),
            None => Err(Problem::not_running(&new.sandbox_id, State::Deleted)),
        };
    };
    // Known to waiters before the row is there: whoever finds the row finds whom to wait for.
    let progress = Arc::new(watch::Sender::new(Progress::default()));
    live.add_command(&new.id, Arc::clone(&progress));
    let accepted = daemon.store.accept_command(&new, UNFINISHED_MAX).await;
    if let Ok(Accepted::New(row)) = accepted {
        Metrics::count(&daemon.metrics.commands);
        drive::start(Arc::clone(daemon), live, row.clone(), progress);
        return Ok(Submitted { row, replayed: false });
    }
    live.end_command(&new.id);
    match accepted? {
        Accepted::New(row) | Accepted::Existing(row) => same(daemon, row, &new),
        Accepted::NotRunning(state) => Err(Problem::not_running(&new.sandbox_id, state)),
        Accepted::TooMany => Err(Problem::new(
            Code::GuestBusy,
            format!(
                "sandbox {} has {UNFINISHED_MAX} unfinished commands, the most there can be",
                new.sandbox_id
            ),
        )),
    }
}

fn same(daemon: &Daemon, row: CommandRow, new: &NewCommand) -> Result<Submitted, Problem> {
    if row.fingerprint != new.fingerprint {
        let detail = format!("request_id `{}` made {} from another body", new.request_id, row.id);
        return Err(Problem::new(Code::RequestIdReused, detail));
    }
    Metrics::count(&daemon.metrics.commands_replayed);
    Ok(Submitted { row, replayed: true })
}

/// Waits until the command's progress is as wanted, for `limit` at most.
pub async fn wait_end(
    live: Option<&Arc<Live>>,
    command: &str,
    limit: Option<Duration>,
    wanted: impl FnMut(&Progress) -> bool,
) {
    let Some(progress) = live.and_then(|live| live.command(command)) else { return };
    let mut progress = progress.subscribe();
    let waited = progress.wait_for(wanted);
    match limit {
        None => drop(waited.await),
        Some(limit) => drop(tokio::time::timeout(limit, waited).await),
    }
}

/// How long the end of a command is worth waiting for: its timeout, the grace, and a margin. A frozen guest keeps no
/// caller for ever. None: it has no timeout.
pub fn watchdog(timeout_ms: Option<i64>) -> Option<Duration> {
    let timeout = u64::try_from(timeout_ms?).ok()?;
    let grace = TERM_GRACE_MS.saturating_add(DRAIN_MS);
    Some(Duration::from_millis(timeout.saturating_add(grace)).saturating_add(limits::WATCHDOG_MARGIN))
}

/// The command as it is now.
pub async fn current(
    daemon: &Daemon,
    live: Option<&Arc<Live>>,
    row: &CommandRow,
) -> Result<CommandRow, Problem> {
    // Asked before the row is read: an end that comes in between is in the row.
    let started = is_started(live, &row.id);
    let row = daemon.store.command(&row.sandbox_id, &row.id).await?.unwrap_or_else(|| row.clone());
    Ok(overlay(row, started))
}

/// A row that was just read, with what is known in memory only.
pub fn overlaid(live: Option<&Arc<Live>>, row: CommandRow) -> CommandRow {
    let started = is_started(live, &row.id);
    overlay(row, started)
}

fn is_started(live: Option<&Arc<Live>>, id: &str) -> bool {
    live.and_then(|live| live.command(id)).is_some_and(|progress| progress.borrow().started)
}

/// That a command runs is known before it is written.
fn overlay(mut row: CommandRow, started: bool) -> CommandRow {
    if started && row.status == "accepted" {
        row.status = "running".to_owned();
    }
    row
}
