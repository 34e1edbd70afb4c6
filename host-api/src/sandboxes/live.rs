//! What is known in memory about a sandbox that is not released: enough to wait for it and to reach its guest.

use crate::commands::Progress;
use crate::ids::SandboxId;
use crate::lifecycle::State;
use crate::store::SandboxRow;
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    pub state: State,
    /// A delete was accepted.
    pub deleted: bool,
    pub released: bool,
}

impl View {
    pub fn usable(self) -> bool {
        self.state == State::Running && !self.deleted
    }
}

#[derive(Debug)]
pub struct Live {
    pub id: SandboxId,
    cid: AtomicU32,
    view: watch::Sender<View>,
    commands: Mutex<HashMap<String, Arc<watch::Sender<Progress>>>>,
}

impl Live {
    pub fn new(id: SandboxId) -> Self {
        let view = View { state: State::Creating, deleted: false, released: false };
        Self { id, cid: AtomicU32::new(0), view: watch::Sender::new(view), commands: Mutex::default() }
    }

    /// Shows what was just stored to everybody who waits. A later view is never replaced by an earlier one: states are
    /// stored one after the other, and this is called by the one who stored it, but two may call at once.
    pub fn publish(&self, row: &SandboxRow) {
        if let Some(cid) = row.cid.and_then(|cid| u32::try_from(cid).ok()) {
            self.cid.store(cid, Ordering::Relaxed);
        }
        let new = View {
            state: State::parse(&row.state).unwrap_or(State::Failed),
            deleted: row.delete_accepted_at.is_some(),
            released: row.released_at.is_some(),
        };
        self.view.send_if_modified(|view| {
            let stale = (view.deleted && !new.deleted) || (view.released && !new.released);
            let change = !stale && *view != new;
            if change {
                *view = new;
            }
            change
        });
    }

    pub fn cid(&self) -> u32 {
        self.cid.load(Ordering::Relaxed)
    }

    pub fn view(&self) -> View {
        *self.view.borrow()
    }

    /// Waits until the view is as wanted.
    pub async fn until(&self, wanted: impl FnMut(&View) -> bool) -> View {
        let mut view = self.view.subscribe();
        let reached = view.wait_for(wanted).await.map(|view| *view);
        match reached {
            Ok(view) => view,
            // The sender is in `self`, which is borrowed.
            Err(_) => std::future::pending().await,
        }
    }

    pub async fn deleted(&self) {
        self.until(|view| view.deleted).await;
    }

    /// Waits until no command can run here any more.
    pub async fn unusable(&self) {
        self.until(|view| !view.usable()).await;
    }

    pub(crate) fn add_command(&self, id: &str, progress: Arc<watch::Sender<Progress>>) {
        lock(&self.commands).insert(id.to_owned(), progress);
    }

    pub(crate) fn command(&self, id: &str) -> Option<Arc<watch::Sender<Progress>>> {
        lock(&self.commands).get(id).cloned()
    }

    pub(crate) fn end_command(&self, id: &str) {
        if let Some(progress) = lock(&self.commands).remove(id) {
            progress.send_modify(|progress| progress.ended = true);
        }
    }
}
