//! The cgroup of each sandbox: what its monitor and guest may take of the host, and the handle that kills all of it.
//!
//! A daemon's sandboxes live under `bivouac/<instance>/`, the instance being derived from its data directory, so that
//! two daemons on one host never see, and never release, each other's.

use super::{MachineError, process};
use crate::ids::SandboxId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", "io"];
/// What the monitor may use on top of the guest's memory, in MiB: its own pages, vhost buffers, page tables.
pub const HEADROOM_MIB: u64 = 64;
/// The monitor's threads: vCPUs (32 at most), devices, vhost workers.
const PIDS_MAX: u32 = 128;

#[derive(Debug, Clone)]
pub struct Cgroups {
    root: PathBuf,
}

impl Cgroups {
    /// Makes the daemon's own part of the tree. Missing controllers are reported and done without.
    pub fn new(instance: &str) -> Result<Self, MachineError> {
        let mount = mount_point().ok_or_else(|| {
            MachineError::Refused(
                "no cgroup v2 hierarchy is mounted: mount one with `mount -t cgroup2 none /sys/fs/cgroup`"
                    .to_owned(),
            )
        })?;
        let product = mount.join("bivouac");
        let root = product.join(instance);
        fs::create_dir_all(&root).map_err(MachineError::io(format!("making {}", root.display())))?;
        for parent in [mount.as_path(), &product, &root] {
            enable(parent);
        }
        Ok(Self { root })
    }

    fn path(&self, id: &SandboxId) -> PathBuf {
        self.root.join(id.as_str())
    }

    pub fn create(&self, id: &SandboxId, memory_mib: u32) -> Result<(), MachineError> {
        let path = self.path(id);
        match fs::create_dir(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(MachineError::io(format!("making {}", path.display()))(e)),
        }
        let bytes = u64::from(memory_mib).saturating_add(HEADROOM_MIB).saturating_mul(1 << 20);
        limit(&path, "memory.max", &bytes.to_string());
        limit(&path, "memory.swap.max", "0");
        limit(&path, "memory.oom.group", "1");
        limit(&path, "pids.max", &PIDS_MAX.to_string());
        Ok(())
    }

    /// `cgroup.procs`, open for writing: handed to the monitor, which joins when its VM descriptor exists.
    pub fn procs(&self, id: &SandboxId) -> Result<File, MachineError> {
        let path = self.path(id).join("cgroup.procs");
        OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(MachineError::io(format!("opening {}", path.display())))
    }

    pub fn members(&self, id: &SandboxId) -> Vec<i32> {
        fs::read_to_string(self.path(id).join("cgroup.procs"))
            .unwrap_or_default()
            .lines()
            .filter_map(|line| line.parse().ok())
            .collect()
    }

    /// Whether the kernel ended something in there for want of memory.
    pub fn oom_killed(&self, id: &SandboxId) -> bool {
        fs::read_to_string(self.path(id).join("memory.events"))
            .unwrap_or_default()
            .lines()
            .filter_map(|line| line.strip_prefix("oom_kill "))
            .any(|count| count.trim() != "0")
    }

    /// Kills everything in there, waits until it is empty, and removes it.
    pub fn remove(&self, id: &SandboxId, patience: Duration) -> Result<(), MachineError> {
        let path = self.path(id);
        if !path.exists() {
            return Ok(());
        }
        if fs::write(path.join("cgroup.kill"), "1").is_err() {
            // Kernels before 5.14 have no cgroup.kill.
            self.members(id).into_iter().for_each(process::kill);
        }
        wait_empty(&path, patience)?;
        match fs::remove_dir(&path) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(MachineError::io(format!("removing {}", path.display()))(e)),
        }
    }

    pub fn list(&self) -> io::Result<Vec<SandboxId>> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            ids.extend(entry?.file_name().to_str().and_then(SandboxId::parse));
        }
        Ok(ids)
    }
}

/// Waits for `populated 0`: the kernel raises `POLLPRI` on `cgroup.events` with each change.
fn wait_empty(path: &Path, patience: Duration) -> Result<(), MachineError> {
    let events = path.join("cgroup.events");
    let failed = || format!("reading {}", events.display());
    let mut file = File::open(&events).map_err(MachineError::io(failed()))?;
    let deadline = Instant::now() + patience;
    loop {
        let mut text = String::new();
        file.rewind().map_err(MachineError::io(failed()))?;
        file.read_to_string(&mut text).map_err(MachineError::io(failed()))?;
        if text.lines().any(|line| line == "populated 0") {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(MachineError::Refused(format!("processes in {} do not end", path.display())));
        }
        let timeout = Timespec::try_from(left).ok();
        let mut polled = [PollFd::new(&file, PollFlags::PRI)];
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(MachineError::os(failed())(e)),
        }
    }
}

fn enable(parent: &Path) {
    let file = parent.join("cgroup.subtree_control");
    let has = fs::read_to_string(&file).unwrap_or_default();
    for controller in CONTROLLERS {
        if has.split_whitespace().any(|name| name == controller) {
            continue;
        }
        if let Err(cause) = fs::write(&file, format!("+{controller}")) {
            tracing::warn!(%cause, controller, cgroup = %parent.display(), "cgroup controller not available: its limits are not in force");
        }
    }
}

fn limit(cgroup: &Path, name: &str, value: &str) {
    let file = cgroup.join(name);
    if let Err(cause) = fs::write(&file, value) {
        tracing::debug!(%cause, file = %file.display(), "cgroup limit not set");
    }
}

/// Where cgroup v2 is mounted: `/proc/self/mountinfo`, field 5, of file system type `cgroup2`.
fn mount_point() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        (after.split(' ').next() == Some("cgroup2")).then_some(())?;
        before.split(' ').nth(4).map(PathBuf::from)
    })
}
