//! Guests that announce themselves.
//!
//! One listener for all of them. Workloads can connect to it too, from any guest, at any time: a connection is dropped
//! at once, unread, unless a machine with exactly its peer's CID is booting and has not announced itself yet.

use crate::machine::BoxChannel;
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_vsock::VsockListener;

/// After a failed accept (descriptors have run out, say) the listener waits this long before it tries again.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Default)]
pub struct Announcements {
    waiting: Arc<Mutex<HashMap<u32, Waiting>>>,
}

struct Waiting {
    ticket: u64,
    tell: oneshot::Sender<BoxChannel>,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Waiting({})", self.ticket)
    }
}

/// An announcement that is waited for. Dropping it ends the waiting.
pub struct Expected {
    waiting: Arc<Mutex<HashMap<u32, Waiting>>>,
    cid: u32,
    ticket: u64,
    arrives: oneshot::Receiver<BoxChannel>,
}

impl std::fmt::Debug for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Expected({})", self.cid)
    }
}

impl Expected {
    /// The connection, once it is there.
    pub async fn arrival(&mut self) -> Option<BoxChannel> {
        (&mut self.arrives).await.ok()
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        let mut waiting = lock(&self.waiting);
        if waiting.get(&self.cid).is_some_and(|w| w.ticket == self.ticket) {
            waiting.remove(&self.cid);
        }
    }
}

impl Announcements {
    /// Admits the next connection from `cid`, and only that one.
    pub fn expect(&self, cid: u32) -> Expected {
        static TICKET: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let ticket = TICKET.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (tell, arrives) = oneshot::channel();
        lock(&self.waiting).insert(cid, Waiting { ticket, tell });
        Expected { waiting: Arc::clone(&self.waiting), cid, ticket, arrives }
    }

    /// Hands over a connection whose peer the kernel says is `cid`. False: nobody waits for it, and it is dropped.
    pub fn arrived(&self, cid: u32, channel: impl FnOnce() -> Option<BoxChannel>) -> bool {
        let Some(waiting) = lock(&self.waiting).remove(&cid) else { return false };
        channel().is_some_and(|channel| waiting.tell.send(channel).is_ok())
    }
}

/// Accepts for ever.
pub async fn listen(listener: VsockListener, announcements: Announcements) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let admitted = announcements.arrived(peer.cid(), || Some(Box::new(stream)));
                tracing::debug!(cid = peer.cid(), admitted, "announcement");
            }
            Err(cause) => {
                tracing::warn!(%cause, "an announcement could not be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel() -> Option<BoxChannel> {
        Some(Box::new(tokio::io::duplex(16).0))
    }

    #[tokio::test]
    async fn only_the_expected_guest_is_admitted_and_only_once() {
        let announcements = Announcements::default();
        let mut expected = announcements.expect(7);
        assert!(!announcements.arrived(8, channel));
        assert!(announcements.arrived(7, channel));
        assert!(!announcements.arrived(7, channel));
        assert!(expected.arrival().await.is_some());
        drop(expected);
        drop(announcements.expect(7));
        assert!(!announcements.arrived(7, channel));
    }
}
