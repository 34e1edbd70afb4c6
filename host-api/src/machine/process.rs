//! Processes, held by pidfd: a number alone may come to mean another process.

use super::MachineError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// A pidfd for `pid`. None: there is no such process any more.
pub fn open(pid: i32) -> Result<Option<OwnedFd>, MachineError> {
    let Some(pid) = Pid::from_raw(pid) else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => Ok(Some(fd)),
        Err(rustix::io::Errno::SRCH) => Ok(None),
        Err(e) => Err(MachineError::os("opening a pidfd")(e)),
    }
}

pub fn kill(pid: i32) {
    if let Ok(Some(pidfd)) = open(pid) {
        kill_pidfd(&pidfd);
    }
}

pub fn kill_pidfd(pidfd: &OwnedFd) {
    // ESRCH: it has ended.
    let _ = pidfd_send_signal(pidfd, Signal::KILL);
}

/// Waits until the process has ended; false if it has not in that time.
pub fn wait(pidfd: &OwnedFd, patience: Duration) -> bool {
    let timeout = Timespec::try_from(patience).ok();
    let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(poll(&mut polled, timeout.as_ref()), Ok(n) if n > 0)
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

/// Waits for a child of ours to end and takes its status. None: it is not ours, or somebody took it.
pub fn reap(pidfd: &OwnedFd) -> Option<Exit> {
    loop {
        match waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED) {
            Ok(Some(status)) => {
                let signal = status.terminating_signal().map(Exit::Signal);
                return status.exit_status().map(Exit::Code).or(signal);
            }
            Err(rustix::io::Errno::INTR) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Every process that has the file open: the last resort to find a monitor that is in no cgroup yet.
pub fn holders(file: &Path) -> Vec<i32> {
    let Ok(wanted) = fs::metadata(file) else { return Vec::new() };
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let holds = |pid: &i32| {
        fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten().any(|entry| {
            fs::metadata(entry.path()).is_ok_and(|m| m.ino() == wanted.ino() && m.dev() == wanted.dev())
        })
    };
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != own)
        .filter(holds)
        .collect()
}
