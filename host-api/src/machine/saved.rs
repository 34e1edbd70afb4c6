//! A machine on disk: a folder with its memory, its state and its disk, never changed once it has its name.

use super::disk::clone_file;
use super::{Machine, MachineError, working_set};
use bivouac_protocol::monitor::{PageRun, ToMonitor};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Where a saved machine is.
#[derive(Debug, Clone)]
pub struct SavedMachine {
    pub folder: PathBuf,
    /// Check all of its memory when it is taken up. Its state is checked always.
    pub verify: bool,
    /// Take it up so that [`SavedMachine::learn`] can tell which pages it touches.
    pub record: bool,
}

impl SavedMachine {
    pub fn state(&self) -> PathBuf {
        self.folder.join(STATE)
    }

    pub fn memory(&self) -> PathBuf {
        self.folder.join(MEMORY)
    }

    pub fn disk(&self) -> PathBuf {
        self.folder.join(DISK)
    }
}

impl SavedMachine {
    /// To be called before a machine is taken up with `record`: the host forgets what it holds of the memory file.
    pub fn forget(&self) -> Result<(), MachineError> {
        let path = self.memory();
        let file = File::open(&path).map_err(MachineError::io(format!("opening {}", path.display())))?;
        working_set::forget(&file).map_err(MachineError::io(format!("forgetting {}", path.display())))
    }

    /// Writes down which pages the machine that was taken up with `record` has touched, for the clones to come.
    /// `monitor`: its process.
    pub fn learn(&self, monitor: i32) -> Result<usize, MachineError> {
        let failed = || MachineError::io(format!("recording the working set of {}", self.folder.display()));
        let runs = working_set::of(monitor, &self.memory()).map_err(failed())?;
        working_set::write(&self.folder.join(WORKING_SET), &runs).map_err(failed())?;
        Ok(runs.iter().map(|run| usize::try_from(run.count).unwrap_or(0)).sum())
    }

    /// What an earlier clone touched; nothing if none was watched. Only ever a hint.
    pub(super) fn prefetch(&self) -> Vec<PageRun> {
        if self.record {
            Vec::new()
        } else {
            working_set::read(&self.folder.join(WORKING_SET)).unwrap_or_default()
        }
    }
}

const WORKING_SET: &str = "working-set";
const STATE: &str = "state";
const MEMORY: &str = "memory";
const DISK: &str = "disk.img";

/// Pauses, writes, and lets go on. What is written appears under its name in one step, after it has reached the disk;
/// whatever breaks off before leaves a folder whose name says that it is partial, which the next attempt replaces.
pub(super) async fn save(machine: &Machine, scratch: File, folder: &Path) -> Result<(), MachineError> {
    let partial = folder.with_extension("partial");
    let failed = || MachineError::io(format!("writing {}", partial.display()));
    if folder.exists() {
        return Err(MachineError::Refused(format!("{} is there already", folder.display())));
    }
    let files = make(&partial).map_err(failed())?;
    machine.ask(ToMonitor::Pause, Vec::new()).await?;
    let written = write(machine, scratch, files).await;
    // Whatever came of it, the guest goes on.
    let resumed = machine.ask(ToMonitor::Resume, Vec::new()).await;
    if let Err(cause) = written.and(resumed.map(drop)) {
        let _ = fs::remove_dir_all(&partial);
        return Err(cause);
    }
    let (partial, folder) = (partial.clone(), folder.to_owned());
    blocking(move || publish(&partial, &folder)).await.map_err(failed())
}

struct Files {
    state: File,
    memory: File,
    disk: File,
}

fn make(partial: &Path) -> io::Result<Files> {
    match fs::remove_dir_all(partial) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => fs::create_dir_all(partial)?,
    }
    let new = |name| File::options().read(true).write(true).create_new(true).open(partial.join(name));
    Ok(Files { state: new(STATE)?, memory: new(MEMORY)?, disk: new(DISK)? })
}

async fn write(machine: &Machine, scratch: File, files: Files) -> Result<(), MachineError> {
    let Files { state, memory, disk } = files;
    blocking(move || clone_file(&scratch, &disk).and_then(|()| disk.sync_all()))
        .await
        .map_err(MachineError::io("copying the machine's disk"))?;
    machine.ask(ToMonitor::Snapshot, vec![state.into(), memory.into()]).await.map(drop)
}

fn publish(partial: &Path, folder: &Path) -> io::Result<()> {
    File::open(partial)?.sync_all()?;
    fs::rename(partial, folder)?;
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

async fn blocking(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(io::Error::other(e)))
}
