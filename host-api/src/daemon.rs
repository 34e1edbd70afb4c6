//! What the parts of the daemon share.

use crate::admission::Admission;
use crate::agent::{Agents, Announcements};
use crate::clock::Clock;
use crate::ids::SandboxId;
use crate::limits;
use crate::machine::Machines;
use crate::metrics::Metrics;
use crate::reserve::Reserve;
use crate::sandboxes::Live;
use crate::store::Store;
use crate::sync::lock;
use crate::templates::Templates;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

pub struct Daemon {
    pub store: Store,
    pub machines: Arc<dyn Machines>,
    pub agents: Agents,
    pub announcements: Announcements,
    pub templates: Templates,
    pub admission: Admission,
    pub clock: Clock,
    pub metrics: Metrics,
    pub reserve: Reserve,
    pub data_dir: PathBuf,
    /// vsock port that guests announce themselves to.
    pub port: u32,
    /// How long the next bytes of a request's body are waited for.
    pub stall: Duration,
    /// Woken when a life may end earlier than the sweeper knows.
    pub expiry: Notify,
    live: Mutex<HashMap<SandboxId, Arc<Live>>>,
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Daemon({})", self.data_dir.display())
    }
}

impl Daemon {
    pub fn new(
        store: Store,
        machines: Arc<dyn Machines>,
        announcements: Announcements,
        templates: Templates,
        data_dir: PathBuf,
        port: u32,
    ) -> Self {
        Self {
            store,
            agents: Agents::new(Arc::clone(&machines)),
            admission: Admission::new(machines.memory_mib()),
            machines,
            announcements,
            templates,
            clock: Clock::default(),
            metrics: Metrics::default(),
            reserve: Reserve::new(&data_dir),
            data_dir,
            port,
            stall: limits::STALL,
            expiry: Notify::new(),
            live: Mutex::default(),
        }
    }

    /// A sandbox that is not released yet.
    pub fn live(&self, id: &SandboxId) -> Option<Arc<Live>> {
        lock(&self.live).get(id).cloned()
    }

    pub(crate) fn keep(&self, live: Arc<Live>) {
        lock(&self.live).insert(live.id.clone(), live);
    }

    pub(crate) fn forget(&self, id: &SandboxId) {
        lock(&self.live).remove(id);
        self.admission.free(id);
    }
}
