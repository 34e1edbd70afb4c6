//! A sandbox's own folder: where its files are, and who holds its lock.
//!
//! Paths of Unix sockets end at 108 bytes, and a data directory may be deep; the control socket is therefore always
//! reached through the folder's descriptor.

use super::MachineError;
use crate::ids::SandboxId;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, mkdirat, openat, unlinkat};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

const SOCKET: &str = "control.sock";
const SCRATCH: &str = "scratch.img";
const LOCK: &str = "lock";
const LOG: &str = "monitor.log";
const COMMANDS: &str = "commands";

/// `<data>/sandboxes`.
#[derive(Debug, Clone)]
pub struct SandboxDirs {
    root: PathBuf,
}

impl SandboxDirs {
    pub fn new(data_dir: &Path) -> io::Result<Self> {
        let root = data_dir.join("sandboxes");
        fs::create_dir_all(&root)?;
        Ok(Self { root })
    }

    fn path(&self, id: &SandboxId) -> PathBuf {
        self.root.join(id.as_str())
    }

    pub fn create(&self, id: &SandboxId) -> Result<SandboxDir, MachineError> {
        let root = self.open_root()?;
        match mkdirat(&root, id.as_str(), Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(MachineError::os(format!("making the folder of {id}"))(e)),
        }
        self.open(id)?.ok_or_else(|| MachineError::Refused(format!("the folder of {id} vanished")))
    }

    /// None: the sandbox has no folder.
    pub fn open(&self, id: &SandboxId) -> Result<Option<SandboxDir>, MachineError> {
        let root = self.open_root()?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(&root, id.as_str(), flags, Mode::empty()) {
            Ok(fd) => Ok(Some(SandboxDir { fd, path: self.path(id) })),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(MachineError::os(format!("opening the folder of {id}"))(e)),
        }
    }

    fn open_root(&self) -> Result<OwnedFd, MachineError> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(&self.root, flags, Mode::empty())
            .map_err(MachineError::os(format!("opening {}", self.root.display())))
    }

    pub fn list(&self) -> io::Result<Vec<SandboxId>> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            ids.extend(entry?.file_name().to_str().and_then(SandboxId::parse));
        }
        Ok(ids)
    }

    /// Removes the folder with all that is in it, and checks.
    pub fn remove(&self, id: &SandboxId) -> Result<(), MachineError> {
        let path = self.path(id);
        match fs::remove_dir_all(&path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(MachineError::io(format!("removing {}", path.display()))(e)),
        }
        match fs::symlink_metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Ok(_) => {
                Err(MachineError::Refused(format!("{} is still there after its removal", path.display())))
            }
            Err(e) => Err(MachineError::io(format!("checking {}", path.display()))(e)),
        }
    }
}

/// Where a stream of a command is spooled.
pub fn spool_path(data_dir: &Path, sandbox: &str, command: &str, stream: &str) -> PathBuf {
    data_dir.join("sandboxes").join(sandbox).join(COMMANDS).join(format!("{command}.{stream}"))
}

/// Where a sandbox's monitor writes its errors, and its guest's console if it has one.
pub fn log_path(data_dir: &Path, sandbox: &str) -> PathBuf {
    data_dir.join("sandboxes").join(sandbox).join(LOG)
}

#[derive(Debug)]
pub struct SandboxDir {
    fd: OwnedFd,
    path: PathBuf,
}

impl SandboxDir {
    fn file(&self, name: &str, flags: OFlags) -> Result<File, MachineError> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        openat(&self.fd, name, flags, Mode::from_raw_mode(0o600))
            .map(File::from)
            .map_err(MachineError::os(format!("opening {}", self.path.join(name).display())))
    }

    pub fn make_commands(&self) -> Result<(), MachineError> {
        match mkdirat(&self.fd, COMMANDS, Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
            Err(e) => Err(MachineError::os(format!("making {}", self.path.join(COMMANDS).display()))(e)),
        }
    }

    /// An empty file for the disk; a leftover of an interrupted start is replaced.
    pub fn new_scratch(&self) -> Result<File, MachineError> {
        self.remove_file(SCRATCH)?;
        self.file(SCRATCH, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)
    }

    pub fn scratch(&self) -> Result<File, MachineError> {
        self.file(SCRATCH, OFlags::RDWR)
    }

    pub fn log(&self) -> Result<File, MachineError> {
        self.file(LOG, OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND)
    }

    /// The lock file, locked. The lock goes with the descriptor: whoever inherits it holds it. None: somebody does.
    pub fn try_lock(&self) -> Result<Option<File>, MachineError> {
        let file = self.file(LOCK, OFlags::RDWR | OFlags::CREATE)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(MachineError::os(format!("locking {}", self.path.join(LOCK).display()))(e)),
        }
    }

    /// Whether a monitor lives.
    pub fn locked(&self) -> Result<bool, MachineError> {
        Ok(self.try_lock()?.is_none())
    }

    pub fn lock_path(&self) -> PathBuf {
        self.path.join(LOCK)
    }

    /// A new listening control socket; a stale one is replaced.
    pub fn listen(&self) -> Result<OwnedFd, MachineError> {
        self.remove_file(SOCKET)?;
        let what = || format!("making {}", self.path.join(SOCKET).display());
        let socket = seqpacket(SocketFlags::CLOEXEC).map_err(MachineError::os(what()))?;
        bind(&socket, &self.address(self.fd.as_fd())?).map_err(MachineError::os(what()))?;
        listen(&socket, 8).map_err(MachineError::os(what()))?;
        Ok(socket)
    }

    /// A connection to the monitor's control socket, non-blocking. None: nobody listens.
    pub fn connect(&self) -> Result<Option<OwnedFd>, MachineError> {
        use rustix::io::Errno;
        let what = || format!("connecting to {}", self.path.join(SOCKET).display());
        let socket =
            seqpacket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).map_err(MachineError::os(what()))?;
        match connect(&socket, &self.address(self.fd.as_fd())?) {
            Ok(()) => Ok(Some(socket)),
            Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
            Err(e) => Err(MachineError::os(what())(e)),
        }
    }

    fn address(&self, fd: BorrowedFd<'_>) -> Result<SocketAddrUnix, MachineError> {
        let path = format!("/proc/self/fd/{}/{SOCKET}", fd.as_raw_fd());
        SocketAddrUnix::new(path).map_err(MachineError::os("naming the control socket"))
    }

    fn remove_file(&self, name: &str) -> Result<(), MachineError> {
        match unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(e) => Err(MachineError::os(format!("removing {}", self.path.join(name).display()))(e)),
        }
    }

    /// Removes what a dead machine leaves; logs and recorded output stay.
    pub fn remove_machine(&self) -> Result<(), MachineError> {
        [SOCKET, SCRATCH, LOCK].into_iter().try_for_each(|name| self.remove_file(name))
    }
}

fn seqpacket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deep_data_directory_still_has_a_control_socket() {
        let base = tempfile::tempdir().unwrap();
        let deep = base.path().join("d".repeat(120)).join("e".repeat(120));
        fs::create_dir_all(&deep).unwrap();
        let dirs = SandboxDirs::new(&deep).unwrap();
        let dir = dirs.create(&SandboxId::new()).unwrap();
        assert!(dir.connect().unwrap().is_none());
        let _listener = dir.listen().unwrap();
        assert!(dir.connect().unwrap().is_some());
        // A stale socket never blocks the next start.
        let _again = dir.listen().unwrap();
    }

    #[test]
    fn the_lock_says_whether_anybody_lives() {
        let base = tempfile::tempdir().unwrap();
        let dirs = SandboxDirs::new(base.path()).unwrap();
        let id = SandboxId::new();
        let dir = dirs.create(&id).unwrap();
        let held = dir.try_lock().unwrap().unwrap();
        assert!(dir.locked().unwrap());
        drop(held);
        assert!(!dir.locked().unwrap());
        dir.remove_machine().unwrap();
        dirs.remove(&id).unwrap();
        dirs.remove(&id).unwrap();
        assert!(dirs.open(&id).unwrap().is_none());
    }
}
