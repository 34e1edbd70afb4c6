//! The descriptors a machine is made from, taken over from the daemon one by one.

use bivouac_protocol::monitor::fd;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use std::{
    fs::{File, FileType},
    os::{
        fd::{BorrowedFd, FromRawFd, OwnedFd},
        unix::fs::FileTypeExt,
    },
};

/// What every machine is made from; see [`fd`].
pub struct Parts {
    pub kvm: OwnedFd,
    pub vsock: File,
    pub root: File,
    pub scratch: File,
    pub cgroup: Option<File>,
    pub tap: Option<File>,
}

/// What a machine that is taken up is made from besides.
pub struct Saved {
    pub state: File,
    pub memory: File,
}

impl Parts {
    /// Each number may be taken once in the life of the process. Err: what is missing.
    pub fn inherit() -> Result<Self, String> {
        Ok(Self {
            kvm: required(inherited(fd::KVM), fd::KVM, "/dev/kvm")?,
            vsock: required(inherited(fd::VSOCK), fd::VSOCK, "/dev/vhost-vsock")?.into(),
            root: file(inherited(fd::ROOT), fd::ROOT, "root image")?,
            scratch: file(inherited(fd::SCRATCH), fd::SCRATCH, "scratch disk")?,
            cgroup: inherited(fd::CGROUP).map(File::from),
            tap: inherited(fd::TAP).map(File::from),
        })
    }
}

/// What a machine begins with: which of these is wanted is known only later, and all are taken at once, before anything that this
/// program opens itself can get the number of one that is not there.
pub struct Beginnings {
    kernel: Option<OwnedFd>,
    state: Option<OwnedFd>,
    memory: Option<OwnedFd>,
}

impl Beginnings {
    pub fn inherit() -> Self {
        Self { kernel: inherited(fd::KERNEL), state: inherited(fd::STATE), memory: inherited(fd::MEMORY) }
    }

    pub fn kernel(self) -> Result<File, String> {
        file(self.kernel, fd::KERNEL, "guest kernel")
    }

    pub fn saved(self) -> Result<Saved, String> {
        Ok(Saved {
            state: file(self.state, fd::STATE, "saved state")?,
            memory: file(self.memory, fd::MEMORY, "saved memory")?,
        })
    }
}

/// A plain file, and nothing that never ends, never answers, or is of no length.
fn file(inherited: Option<OwnedFd>, number: i32, what: &str) -> Result<File, String> {
    let file = File::from(required(inherited, number, what)?);
    match file.metadata() {
        Ok(found) if found.is_file() => Ok(file),
        Ok(found) => Err(format!(
            "descriptor {number} ({what}) is no regular file, it is a {}",
            kind(found.file_type())
        )),
        Err(e) => Err(format!("descriptor {number} ({what}) cannot be looked at: {e}")),
    }
}

fn kind(found: FileType) -> &'static str {
    match found {
        found if found.is_dir() => "directory",
        found if found.is_fifo() => "pipe",
        found if found.is_socket() => "socket",
        _ => "device",
    }
}

fn required(inherited: Option<OwnedFd>, number: i32, what: &str) -> Result<OwnedFd, String> {
    inherited.ok_or_else(|| format!("descriptor {number} ({what}) is not open"))
}

/// Takes over an inherited descriptor, if it is open, and keeps it from any child.
pub fn inherited(number: i32) -> Option<OwnedFd> {
    // SAFETY: only borrowed for the two calls that find out whether it is open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(borrowed).ok()?;
    fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC).ok()?;
    // SAFETY: it is open, this program opened nothing under a fixed number, and each number is taken once.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}
