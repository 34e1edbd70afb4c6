//! The world of machines, behind one trait: what boots, finds again, reaches and releases them.
//!
//! The real half starts monitor processes ([`real`]); the simulated half is for tests and never built into the product.
//! What must never happen here: a decision about a sandbox's life, or a release that is reported and not checked.

mod cgroup;
mod dir;
mod disk;
mod monitor;
mod network;
mod process;
mod saved;
mod spawn;
mod working_set;
pub use bivouac_protocol::monitor::Timing as Booted;
pub use dir::{log_path, spool_path};
pub use saved::SavedMachine;

pub mod real;
#[cfg(test)]
pub mod simulated;

use self::monitor::Ask;
use crate::ids::SandboxId;
use crate::lifecycle::{Reason, Scope};
use async_trait::async_trait;
use bivouac_protocol::monitor::{FromMonitor, ToMonitor};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, oneshot, watch};

/// A connection to an agent.
pub trait Channel: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Channel for T {}
pub type BoxChannel = Box<dyn Channel>;

/// All that is needed to make one machine.
#[derive(Debug, Clone)]
pub struct MachineSpec {
    pub id: SandboxId,
    pub vcpus: u8,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub cid: u32,
    /// The template's root image.
    pub root: PathBuf,
    /// Taken up instead of booted: then processors and memory are those it was saved with.
    pub saved: Option<SavedMachine>,
    /// Appended to the guest kernel's command line.
    pub cmdline: String,
}

#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// What failed, with the path it was for.
    #[error("{what} failed: {cause}")]
    Io { what: String, cause: io::Error },
    #[error("{0}")]
    Refused(String),
}

impl MachineError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |cause| Self::Io { what, cause }
    }

    pub(crate) fn os(what: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let what = what.into();
        move |cause| Self::Io { what, cause: cause.into() }
    }
}

/// How a machine came to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineEnd {
    /// The guest's address was taken on this host: nothing ran, another address may do.
    CidTaken,
    Ended(Reason),
}

impl MachineEnd {
    pub fn reason(self) -> Reason {
        match self {
            MachineEnd::CidTaken => {
                Reason::new("boot_failed", "no free vsock address was found for the guest")
            }
            MachineEnd::Ended(reason) => reason,
        }
    }
}

/// A machine that was started or found. Dropping it ends nothing.
#[derive(Debug)]
pub struct Machine {
    end: watch::Receiver<Option<MachineEnd>>,
    booted: watch::Receiver<Option<Booted>>,
    asks: mpsc::Sender<Ask>,
}

impl Machine {
    pub fn new(
        end: watch::Receiver<Option<MachineEnd>>,
        booted: watch::Receiver<Option<Booted>>,
        asks: mpsc::Sender<Ask>,
    ) -> Self {
        Self { end, booted, asks }
    }

    /// Asks the monitor for something that has one answer.
    pub async fn ask(&self, what: ToMonitor, files: Vec<OwnedFd>) -> Result<FromMonitor, MachineError> {
        let gone = || MachineError::Refused("the monitor is gone".to_owned());
        let (reply, answer) = oneshot::channel();
        self.asks.send(Ask { what, files, reply }).await.map_err(|_| gone())?;
        match answer.await.map_err(|_| gone())? {
            FromMonitor::Refused { detail } => Err(MachineError::Refused(detail)),
            answer => Ok(answer),
        }
    }

    /// Waits for its end. The process is reaped when this returns.
    pub async fn ended(&mut self) -> MachineEnd {
        match self.end.wait_for(Option::is_some).await.map(|end| end.clone()) {
            Ok(Some(end)) => end,
            Ok(None) | Err(_) => {
                MachineEnd::Ended(Reason::new("monitor_lost", "the monitor is no longer watched"))
            }
        }
    }

    pub fn booted(&self) -> Option<Booted> {
        *self.booted.borrow()
    }
}

/// The world. Every method may be called again after a crash in the middle of it.
#[async_trait]
pub trait Machines: Send + Sync + 'static {
    /// Makes what the machine will stand on: its folder, disk and cgroup. Starts no process.
    async fn prepare(&self, spec: &MachineSpec) -> Result<(), MachineError>;

    /// Starts the machine and returns at once; how it goes shows in the result. To be awaited to its end.
    async fn launch(&self, spec: &MachineSpec) -> Result<Machine, MachineError>;

    /// Finds a machine that an earlier daemon started. None: it is gone.
    async fn find(&self, id: &SandboxId) -> Result<Option<Machine>, MachineError>;

    /// Ends and removes everything in the scope. Returns only once each part was seen to be gone.
    async fn release(&self, id: &SandboxId, scope: Scope) -> Result<(), MachineError>;

    /// Every sandbox this host holds something for, in the places that are this daemon's own.
    async fn survey(&self) -> Result<BTreeSet<SandboxId>, MachineError>;

    /// Opens a connection to the agent at `cid`.
    async fn connect(&self, cid: u32) -> io::Result<BoxChannel>;

    /// The sizes of disk that can be given, in MiB, smallest first.
    fn disk_sizes(&self) -> Vec<u32>;

    /// Memory this host can give to guests altogether, in MiB.
    fn memory_mib(&self) -> u64;
}
