//! Ends: by a caller, and by the clock.

use super::Live;
use crate::daemon::Daemon;
use crate::error::Problem;
use crate::ids::SandboxId;
use crate::lifecycle::{DeletionReason, Input};
use crate::limits;
use crate::store::{Details, SandboxRow};
use std::sync::Arc;
use std::time::Duration;

/// The wall clock is looked at again after this long at the latest: it may jump.
const LOOK: Duration = Duration::from_secs(30);

/// Accepts a delete. It is durable when this returns; the release goes on by itself. None: no such sandbox.
pub async fn delete(
    daemon: &Daemon,
    id: &SandboxId,
    reason: DeletionReason,
    details: Details,
) -> Result<Option<SandboxRow>, Problem> {
    let input = Input::Delete { at: daemon.clock.now(), reason };
    let applied = match daemon.store.apply(id.as_str(), &input, details.clone()).await {
        // What frees room must not be refused for want of it.
        Err(cause) if cause.disk_full() && daemon.reserve.give_up() => {
            daemon.store.apply(id.as_str(), &input, details).await?
        }
        applied => applied?,
    };
    let Some(applied) = applied else { return Ok(None) };
    // The sandbox's task sees it here and releases everything.
    if let Some(live) = daemon.live(id) {
        live.publish(&applied.row);
    }
    Ok(Some(applied.row))
}

/// Waits for the release, for a bounded time. True: it is released.
pub async fn wait_released(live: Option<Arc<Live>>) -> bool {
    let Some(live) = live else { return true };
    tokio::time::timeout(limits::RELEASE_WAIT, live.until(|view| view.released)).await.is_ok()
}

/// Ends the lives whose time has come, for ever. The deadline is a row: it holds across restarts, and an end is a
/// compare-and-set on it, so that a life that was renewed meanwhile goes on.
pub async fn sweep(daemon: Arc<Daemon>) {
    loop {
        let now = daemon.clock.now();
        let pause = match daemon.store.expired(now).await {
            Ok((due, next)) => {
                for (id, expires_at) in due {
                    end_life(&daemon, &id, expires_at).await;
                }
                let left = next.and_then(|next| u64::try_from(next.saturating_sub(now)).ok());
                left.map_or(LOOK, Duration::from_millis).min(LOOK)
            }
            Err(cause) => {
                tracing::error!(%cause, "the store could not be asked whose time has come");
                Duration::from_secs(1)
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause.max(Duration::from_millis(5))) => {}
            () = daemon.expiry.notified() => {}
        }
    }
}

async fn end_life(daemon: &Daemon, id: &str, expires_at: i64) {
    let Some(id) = SandboxId::parse(id) else { return };
    let details = Details { if_expires_at: Some(expires_at), ..Details::default() };
    match delete(daemon, &id, DeletionReason::Ttl, details).await {
        Ok(_) => tracing::info!(sandbox = %id, "its time to live has run out"),
        Err(cause) => tracing::error!(sandbox = %id, %cause, "it could not be deleted; trying again"),
    }
}
