//! The descriptors a machine is made from, taken over from the daemon one by one.

use bivouac_protocol::monitor::fd;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use std::{
    fs::File,
    os::fd::{BorrowedFd, FromRawFd, OwnedFd},
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
            kvm: required(fd::KVM, "/dev/kvm")?,
            vsock: required(fd::VSOCK, "/dev/vhost-vsock")?.into(),
            root: required(fd::ROOT, "root image")?.into(),
            scratch: required(fd::SCRATCH, "scratch disk")?.into(),
            cgroup: inherited(fd::CGROUP).map(File::from),
            tap: inherited(fd::TAP).map(File::from),
        })
    }
}

impl Saved {
    pub fn inherit() -> Result<Self, String> {
        Ok(Self {
            state: required(fd::STATE, "saved state")?.into(),
            memory: required(fd::MEMORY, "saved memory")?.into(),
        })
    }
}

pub fn required(number: i32, what: &str) -> Result<OwnedFd, String> {
    inherited(number).ok_or_else(|| format!("descriptor {number} ({what}) is not open"))
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
