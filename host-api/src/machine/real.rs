//! Machines for real: one monitor process each, started with descriptors and held by pidfd, cgroup and lock.

use super::cgroup::{Cgroups, HEADROOM_MIB};
use super::dir::{SandboxDir, SandboxDirs};
use super::disk::{EmptyDisks, clone_file};
use super::monitor::{self, Watched};
use super::spawn::{Inheritance, spawn};
use super::{BoxChannel, Machine, MachineError, MachineSpec, Machines, network, process, saved};
use crate::ids::SandboxId;
use crate::lifecycle::Scope;
use crate::sync::lock;
use async_trait::async_trait;
use bivouac_protocol::agent::AGENT_PORT;
use bivouac_protocol::monitor::{BootConfig, Jail, RestoreConfig, ToMonitor, VERSION};
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio_vsock::{VsockAddr, VsockStream};

/// How long a killed process may take to be gone before the release is tried again.
const DEATH: Duration = Duration::from_secs(10);
/// Memory left to the host itself, in MiB.
const HOST_RESERVE_MIB: u64 = 256;

#[derive(Debug, Clone)]
pub struct Settings {
    pub data_dir: PathBuf,
    /// Holds `bin/bivouac-vmm`, `kernel/vmlinux` and `scratch/`.
    pub prefix: PathBuf,
    /// Tells this daemon's cgroups from another's.
    pub instance: String,
    /// Guests get a serial console that goes to their monitor's log. For debugging: it slows the boot.
    pub console: bool,
}

#[derive(Debug, Clone)]
pub struct RealMachines {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    settings: Settings,
    dirs: SandboxDirs,
    cgroups: Cgroups,
    disks: EmptyDisks,
    /// Where monitors are that reach nothing.
    network: OwnedFd,
    /// Monitors this daemon knows: a monitor joins its cgroup late, and until then this is the only hold on it.
    known: Mutex<HashMap<SandboxId, Arc<OwnedFd>>>,
}

impl RealMachines {
    pub fn new(settings: Settings) -> Result<Self, MachineError> {
        let dirs = SandboxDirs::new(&settings.data_dir)
            .map_err(MachineError::io("making the folder of sandboxes"))?;
        let cgroups = Cgroups::new(&settings.instance)?;
        let disks = EmptyDisks::new(settings.prefix.join("scratch"), settings.data_dir.join("disks"));
        let network = network::empty().map_err(MachineError::io("making an empty network namespace"))?;
        let known = Mutex::new(HashMap::new());
        Ok(Self { inner: Arc::new(Inner { settings, dirs, cgroups, disks, network, known }) })
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T, MachineError> + Send + 'static,
    ) -> Result<T, MachineError> {
        let inner = Arc::clone(&self.inner);
        tokio::task::spawn_blocking(move || work(&inner))
            .await
            .unwrap_or_else(|e| Err(MachineError::Refused(format!("a host operation broke off: {e}"))))
    }

    fn watch(&self, id: &SandboxId, mut watched: Watched) -> Result<Machine, MachineError> {
        lock(&self.inner.known).insert(id.clone(), Arc::clone(&watched.pidfd));
        let (cgroups, name) = (self.inner.cgroups.clone(), id.clone());
        watched.oom_killed = Box::new(move || cgroups.oom_killed(&name));
        monitor::watch(watched, id.to_string())
    }
}

impl Inner {
    fn prepare(&self, spec: &MachineSpec) -> Result<(), MachineError> {
        let dir = self.dirs.create(&spec.id)?;
        dir.make_commands()?;
        let scratch = dir.new_scratch()?;
        match &spec.saved {
            None => self.disks.clone_into(spec.disk_mib, &scratch)?,
            Some(saved) => clone_file(&open(&saved.disk())?, &scratch)
                .map_err(MachineError::io(format!("copying {}", saved.disk().display())))?,
        }
        self.cgroups.create(&spec.id, spec.memory_mib)
    }

    fn launch(&self, spec: &MachineSpec) -> Result<Watched, MachineError> {
        let dir = self.open(&spec.id)?;
        let lock = dir.try_lock()?.ok_or_else(|| {
            MachineError::Refused(format!(
                "{} has a monitor that lives: a second one would share its disk",
                spec.id
            ))
        })?;
        let listener = dir.listen()?;
        // Connected and spoken to before the monitor exists: it finds its orders when it first looks.
        let control =
            dir.connect()?.ok_or_else(|| MachineError::Refused("the control socket vanished".to_owned()))?;
        let device = |path: &str| {
            File::options()
                .read(true)
                .write(true)
                .open(path)
                .map_err(MachineError::io(format!("opening {path}")))
        };
        let (kernel, saved) = match &spec.saved {
            None => (Some(open(&self.settings.prefix.join("kernel/vmlinux"))?), None),
            Some(saved) => (None, Some((open(&saved.state())?, open(&saved.memory())?))),
        };
        let parts = Inheritance {
            control: listener,
            kernel,
            root: open(&spec.root)?,
            scratch: dir.scratch()?,
            cgroup: self.cgroups.procs(&spec.id)?,
            lock,
            kvm: device("/dev/kvm")?,
            vsock: device("/dev/vhost-vsock")?,
            network: self
                .network
                .try_clone()
                .map_err(MachineError::io("copying the network namespace's descriptor"))?,
            saved,
            log: dir.log()?,
        };
        monitor::say(&control, &self.orders(spec))?;
        let child = spawn(&self.settings.prefix.join("bin/bivouac-vmm"), parts)?;
        Ok(Watched {
            pidfd: Arc::new(child.pidfd),
            ours: true,
            control,
            asked: false,
            oom_killed: Box::new(|| false),
        })
    }

    fn orders(&self, spec: &MachineSpec) -> ToMonitor {
        let jail = jail(spec.cid);
        match &spec.saved {
            None => ToMonitor::Boot(BootConfig {
                version: VERSION,
                jail,
                vcpus: spec.vcpus,
                memory_mib: spec.memory_mib,
                cid: spec.cid,
                cmdline: spec.cmdline.clone(),
                console: self.settings.console,
                network: None,
            }),
            Some(saved) => ToMonitor::Restore(RestoreConfig {
                version: VERSION,
                jail,
                cid: spec.cid,
                verify: saved.verify,
                network: None,
                prefetch: saved.prefetch(),
                record: saved.record,
            }),
        }
    }

    fn find(&self, id: &SandboxId) -> Result<Option<Watched>, MachineError> {
        let Some(dir) = self.dirs.open(id)? else { return Ok(None) };
        if !dir.locked()? {
            return Ok(None);
        }
        let Some(pidfd) = self.member(id)? else { return Ok(None) };
        let Some(control) = dir.connect()? else { return Ok(None) };
        // An earlier daemon may have been killed while it had the machine paused. One that runs takes no notice.
        monitor::say(&control, &ToMonitor::Resume)?;
        Ok(Some(Watched {
            pidfd: Arc::new(pidfd),
            ours: false,
            control,
            asked: true,
            oom_killed: Box::new(|| false),
        }))
    }

    /// A pidfd of the process in the sandbox's cgroup, and in it still once the descriptor is open.
    fn member(&self, id: &SandboxId) -> Result<Option<OwnedFd>, MachineError> {
        for pid in self.cgroups.members(id) {
            if let Some(pidfd) = process::open(pid)?
                && self.cgroups.members(id).contains(&pid)
            {
                return Ok(Some(pidfd));
            }
        }
        Ok(None)
    }

    fn release(&self, id: &SandboxId, scope: Scope) -> Result<(), MachineError> {
        let known = lock(&self.known).get(id).cloned();
        if let Some(pidfd) = known {
            process::kill_pidfd(&pidfd);
            if !process::wait(&pidfd, DEATH) {
                return Err(MachineError::Refused(format!(
                    "the monitor of {id} was killed and does not end"
                )));
            }
        }
        self.cgroups.remove(id, DEATH)?;
        if let Some(dir) = self.dirs.open(id)? {
            evict(id, &dir)?;
            dir.remove_machine()?;
        }
        if scope == Scope::Everything {
            self.dirs.remove(id)?;
        }
        lock(&self.known).remove(id);
        Ok(())
    }

    fn open(&self, id: &SandboxId) -> Result<SandboxDir, MachineError> {
        self.dirs.open(id)?.ok_or_else(|| MachineError::Refused(format!("{id} has no folder")))
    }
}

/// Ends a monitor that is neither known nor in a cgroup: one that a daemon started just before it was killed itself.
/// Whoever holds the lock file open is it; the lock free again is the proof that none is left.
fn evict(id: &SandboxId, dir: &SandboxDir) -> Result<(), MachineError> {
    if !dir.locked()? {
        return Ok(());
    }
    for pid in process::holders(&dir.lock_path()) {
        if let Some(pidfd) = process::open(pid)? {
            process::kill_pidfd(&pidfd);
            process::wait(&pidfd, DEATH);
        }
    }
    if dir.locked()? {
        return Err(MachineError::Refused(format!(
            "the lock of {id} is still held after its monitor was killed"
        )));
    }
    Ok(())
}

impl RealMachines {
    /// Writes a running machine to a new folder: its memory, its state and its disk, all of one moment. The folder is
    /// there whole or not at all. Meanwhile the machine is paused, and runs again when this returns.
    pub async fn save(&self, id: &SandboxId, machine: &Machine, folder: &Path) -> Result<(), MachineError> {
        let scratch = self.inner.open(id)?.scratch()?;
        saved::save(machine, scratch, folder).await
    }
}

#[async_trait]
impl Machines for RealMachines {
    async fn prepare(&self, spec: &MachineSpec) -> Result<(), MachineError> {
        let spec = spec.clone();
        self.blocking(move |inner| inner.prepare(&spec)).await
    }

    async fn launch(&self, spec: &MachineSpec) -> Result<Machine, MachineError> {
        let (id, spec) = (spec.id.clone(), spec.clone());
        let watched = self.blocking(move |inner| inner.launch(&spec)).await?;
        self.watch(&id, watched)
    }

    async fn find(&self, id: &SandboxId) -> Result<Option<Machine>, MachineError> {
        let wanted = id.clone();
        let found = self.blocking(move |inner| inner.find(&wanted)).await?;
        found.map(|watched| self.watch(id, watched)).transpose()
    }

    async fn release(&self, id: &SandboxId, scope: Scope) -> Result<(), MachineError> {
        let id = id.clone();
        self.blocking(move |inner| inner.release(&id, scope)).await
    }

    async fn survey(&self) -> Result<BTreeSet<SandboxId>, MachineError> {
        self.blocking(|inner| {
            let mut ids: BTreeSet<_> = inner
                .dirs
                .list()
                .map_err(MachineError::io("listing the folders of sandboxes"))?
                .into_iter()
                .collect();
            ids.extend(inner.cgroups.list().map_err(MachineError::io("listing cgroups"))?);
            Ok(ids)
        })
        .await
    }

    async fn connect(&self, cid: u32) -> io::Result<BoxChannel> {
        Ok(Box::new(VsockStream::connect(VsockAddr::new(cid, AGENT_PORT)).await?))
    }

    fn disk_sizes(&self) -> Vec<u32> {
        self.inner.disks.sizes()
    }

    fn memory_mib(&self) -> u64 {
        let total = fs::read_to_string("/proc/meminfo")
            .unwrap_or_default()
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok())
            .unwrap_or(0);
        (total / 1024).saturating_sub(HOST_RESERVE_MIB)
    }
}

/// First user and group of monitors; far above what systems give to people and services.
const FIRST_UID: u32 = 1_600_000_000;

/// A user for each guest address, since no two live machines of a host share one.
fn jail(cid: u32) -> Jail {
    let id = FIRST_UID + cid % 400_000_000;
    Jail { uid: id, gid: id }
}

fn open(path: &Path) -> Result<File, MachineError> {
    File::open(path).map_err(MachineError::io(format!("opening {}", path.display())))
}

/// What one machine takes of the host's memory at most, in MiB.
pub fn memory_cost_mib(memory_mib: u32) -> u64 {
    u64::from(memory_mib).saturating_add(HEADROOM_MIB)
}
