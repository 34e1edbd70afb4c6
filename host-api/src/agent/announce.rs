//! Guests that announce themselves.
//!
//! One listener for all of them. Workloads can connect to it too, from any guest, at any time: a connection is listened
//! to only if a machine with exactly its peer's CID is starting and has not announced itself yet. Any other is kept
//! unread, one for each guest: agents hold on to their announcement, and one that was dropped would come again.

use crate::machine::BoxChannel;
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio_vsock::VsockListener;

/// After a failed accept (descriptors have run out, say) the listener waits this long before it tries again.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Default)]
pub struct Announcements {
    waiting: Arc<Mutex<HashMap<u32, Waiting>>>,
    kept: Arc<Mutex<HashMap<u32, Kept>>>,
}

struct Waiting {
    ticket: u64,
    tell: oneshot::Sender<BoxChannel>,
}

/// An announcement that is kept, by the task that owns it.
#[derive(Debug)]
struct Kept {
    ticket: u64,
    task: AbortHandle,
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
        let ticket = ticket();
        let (tell, arrives) = oneshot::channel();
        lock(&self.waiting).insert(cid, Waiting { ticket, tell });
        Expected { waiting: Arc::clone(&self.waiting), cid, ticket, arrives }
    }

    /// Hands over a connection whose peer the kernel says is `cid`. False: nobody waits for it, and it is kept.
    pub fn arrived(&self, cid: u32, channel: BoxChannel) -> bool {
        let Some(waiting) = lock(&self.waiting).remove(&cid) else {
            self.keep(cid, channel);
            return false;
        };
        waiting.tell.send(channel).is_ok()
    }

    /// Keeps a guest's announcement open until the guest closes it, in place of the one kept before.
    pub fn keep(&self, cid: u32, mut channel: BoxChannel) {
        let ticket = ticket();
        let all = Arc::clone(&self.kept);
        let mut kept = lock(&self.kept);
        let task = tokio::spawn(async move {
            // An agent says nothing more; whatever comes instead is not worth keeping a connection for.
            let _ = channel.read(&mut [0_u8; 1]).await;
            let mut all = lock(&all);
            if all.get(&cid).is_some_and(|kept| kept.ticket == ticket) {
                all.remove(&cid);
            }
        });
        if let Some(before) = kept.insert(cid, Kept { ticket, task: task.abort_handle() }) {
            before.task.abort();
        }
    }
}

/// Tells one entry from a later one of the same guest.
fn ticket() -> u64 {
    static TICKET: AtomicU64 = AtomicU64::new(0);
    TICKET.fetch_add(1, Ordering::Relaxed)
}

/// Accepts for ever.
pub async fn listen(listener: VsockListener, announcements: Announcements) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let admitted = announcements.arrived(peer.cid(), Box::new(stream));
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

    fn channel() -> BoxChannel {
        Box::new(tokio::io::duplex(16).0)
    }

    #[tokio::test]
    async fn an_announcement_nobody_waits_for_is_kept_one_for_each_guest() {
        let announcements = Announcements::default();
        let (ours, mut first) = tokio::io::duplex(16);
        assert!(!announcements.arrived(7, Box::new(ours)));
        let (ours, second) = tokio::io::duplex(16);
        assert!(!announcements.arrived(7, Box::new(ours)));
        // The first was dropped for the second.
        assert_eq!(first.read(&mut [0; 1]).await.unwrap(), 0);
        assert_eq!(lock(&announcements.kept).len(), 1);
        drop(second);
        while !lock(&announcements.kept).is_empty() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn only_the_expected_guest_is_admitted_and_only_once() {
        let announcements = Announcements::default();
        let mut expected = announcements.expect(7);
        assert!(!announcements.arrived(8, channel()));
        assert!(announcements.arrived(7, channel()));
        assert!(!announcements.arrived(7, channel()));
        assert!(expected.arrival().await.is_some());
        drop(expected);
        drop(announcements.expect(7));
        assert!(!announcements.arrived(7, channel()));
    }
}
