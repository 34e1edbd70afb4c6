//! One monitor process: how it is started, spoken to and watched.
//!
//! The watch ends in one value, published when the process itself is gone. Nothing polls: the process is a pidfd, the
//! connection a socket, and both wake the same task.

use super::process;
use super::{Booted, Machine, MachineEnd, MachineError};
use crate::lifecycle::Reason;
use bivouac_protocol::monitor::{self, FromMonitor, MAX_MESSAGE, StopReason, ToMonitor, fd};
use command_fds::{CommandFdExt, FdMapping};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

/// How long a monitor that has said its last word may take to go.
const LEAVE: Duration = Duration::from_secs(5);

/// What a monitor inherits, in the order of [`fd`].
#[derive(Debug)]
pub struct Inheritance {
    pub control: OwnedFd,
    pub kernel: File,
    pub root: File,
    pub scratch: File,
    pub cgroup: File,
    pub lock: File,
    pub log: File,
}

/// Starts the program with its descriptors and nothing else: no environment, no terminal, no standard input.
pub fn spawn(program: &Path, parts: Inheritance) -> Result<(Child, OwnedFd), MachineError> {
    let map = |parent_fd: OwnedFd, child_fd| FdMapping { parent_fd, child_fd };
    let mut command = Command::new(program);
    command
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::from(parts.log))
        .fd_mappings(vec![
            map(parts.control, fd::CONTROL),
            map(parts.kernel.into(), fd::KERNEL),
            map(parts.root.into(), fd::ROOT),
            map(parts.scratch.into(), fd::SCRATCH),
            map(parts.cgroup.into(), fd::CGROUP),
            map(parts.lock.into(), fd::LOCK),
        ])
        .map_err(|_| MachineError::Refused("two descriptors for the monitor have one number".to_owned()))?;
    // SAFETY: setsid is async-signal-safe and touches no memory of this process.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        });
    }
    let mut child = command.spawn().map_err(MachineError::io(format!("starting {}", program.display())))?;
    // It is our child and not reaped, so its number is still its own.
    let pidfd = i32::try_from(child.id())
        .map_err(|_| MachineError::Refused("a process id is out of range".to_owned()));
    match pidfd.and_then(process::open) {
        Ok(Some(pidfd)) => Ok((child, pidfd)),
        failed => {
            let _ = child.kill();
            let _ = child.wait();
            Err(failed.err().unwrap_or_else(|| MachineError::Refused("the monitor vanished".to_owned())))
        }
    }
}

/// Puts one message in the socket; it has room for it.
pub fn say(control: &OwnedFd, message: &ToMonitor) -> Result<(), MachineError> {
    let packet = monitor::encode(message)
        .map_err(|e| MachineError::Refused(format!("a message for the monitor could not be written: {e}")))?;
    send(control, &packet, SendFlags::NOSIGNAL).map_err(MachineError::os("speaking to the monitor"))?;
    Ok(())
}

/// Asked once the monitor is dead.
pub type OomKilled = Box<dyn Fn() -> bool + Send + Sync>;

/// A monitor as the watch sees it.
pub struct Watched {
    pub pidfd: Arc<OwnedFd>,
    /// Present if it is our own child, and ours to reap.
    pub child: Option<Child>,
    pub control: OwnedFd,
    /// Whether the kernel killed it for want of memory.
    pub oom_killed: OomKilled,
}

/// Watches a monitor to its end in a task of its own.
pub fn watch(watched: Watched, name: String) -> Result<Machine, MachineError> {
    let failed = || MachineError::io(format!("watching the monitor of {name}"));
    let alive = readable(watched.pidfd.try_clone().map_err(failed())?).map_err(failed())?;
    let control = readable(watched.control).map_err(failed())?;
    let (mut child, oom_killed) = (watched.child, watched.oom_killed);
    let (end_tx, end_rx) = watch::channel(None);
    let (booted_tx, booted_rx) = watch::channel(None);
    tokio::spawn(async move {
        let said = converse(&control, &alive, &booted_tx).await;
        if said.is_some() && tokio::time::timeout(LEAVE, gone(&alive)).await.is_err() {
            process::kill_pidfd(alive.get_ref());
        }
        gone(&alive).await;
        let status = child.as_mut().and_then(|child| child.wait().ok());
        let end = ending(said, status, oom_killed());
        // Whether that is a fault is not known here: a release kills it as well. Whoever it takes by surprise says so.
        tracing::debug!(sandbox = %name, ?end, "monitor ended");
        end_tx.send_replace(Some(end));
    });
    Ok(Machine::new(end_rx, booted_rx))
}

fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned by the AsyncFd, so it stays open and the same for as long as that lives.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(Into::into)
}

/// Waits until the process has ended: its pidfd is readable from then on.
async fn gone(alive: &AsyncFd<OwnedFd>) {
    if let Err(cause) = alive.readable().await.map(|_| ()) {
        // Only when the runtime ends, and this task with it.
        tracing::debug!(%cause, "no longer watched");
        std::future::pending::<()>().await;
    }
}

fn ending(said: Option<FromMonitor>, status: Option<ExitStatus>, oom_killed: bool) -> MachineEnd {
    match said {
        Some(FromMonitor::Failed { detail }) if cid_taken(&detail) => MachineEnd::CidTaken,
        Some(FromMonitor::Failed { detail }) => MachineEnd::Ended(Reason::new("boot_failed", detail)),
        Some(FromMonitor::Stopped(reason)) => MachineEnd::Ended(stopped(reason)),
        _ => MachineEnd::Ended(silent(status, oom_killed)),
    }
}

/// The kernel answers a guest CID that another machine has with `EADDRINUSE` on `VHOST_VSOCK_SET_GUEST_CID`.
fn cid_taken(detail: &str) -> bool {
    let detail = detail.to_ascii_lowercase();
    (detail.contains("context id") || detail.contains("cid"))
        && (detail.contains("in use") || detail.contains("eaddrinuse"))
}

fn stopped(reason: StopReason) -> Reason {
    match reason {
        StopReason::Requested => Reason::new("stopped", "the machine was stopped on request"),
        StopReason::GuestShutdown => Reason::new("guest_shutdown", "the guest powered itself off"),
        StopReason::GuestCrash { detail } => Reason::new("guest_crashed", detail),
        StopReason::Fault { detail } => Reason::new("device_fault", detail),
    }
}

fn silent(status: Option<ExitStatus>, oom_killed: bool) -> Reason {
    if oom_killed {
        return Reason::new(
            "host_memory_limit",
            "the machine went over its memory limit on the host and was killed",
        );
    }
    match status.map(|status| (status.signal(), status.code())) {
        Some((Some(signal), _)) => {
            Reason::new("monitor_killed", format!("the monitor was killed by signal {signal}"))
        }
        Some((None, Some(code))) => {
            Reason::new("monitor_exited", format!("the monitor exited with code {code}"))
        }
        _ => Reason::new("monitor_killed", "the monitor's process ended without a word"),
    }
}

/// Hears the monitor out: to its last message, the end of the connection, or the end of the process.
async fn converse(
    control: &AsyncFd<OwnedFd>,
    alive: &AsyncFd<OwnedFd>,
    booted: &watch::Sender<Option<Booted>>,
) -> Option<FromMonitor> {
    loop {
        let heard = tokio::select! {
            biased;
            heard = control.async_io(Interest::READABLE, receive) => heard,
            // Its last word may still lie in the socket.
            () = gone(alive) => return last_word(control.get_ref()),
        };
        match heard {
            Ok(Some(FromMonitor::Booted { configured_us, vm_created_us, booted_us })) => {
                booted.send_replace(Some(Booted { configured_us, vm_created_us, booted_us }));
            }
            Ok(Some(FromMonitor::Status { .. })) => {}
            Ok(Some(last @ (FromMonitor::Stopped(_) | FromMonitor::Failed { .. }))) => return Some(last),
            Ok(None) => return None,
            Err(cause) => {
                tracing::debug!(%cause, "control connection broken");
                return None;
            }
        }
    }
}

fn receive(fd: &OwnedFd) -> io::Result<Option<FromMonitor>> {
    let mut packet = vec![0_u8; MAX_MESSAGE];
    let (len, _) = recv(fd, packet.as_mut_slice(), RecvFlags::DONTWAIT)?;
    match packet.get(..len) {
        None | Some([]) => Ok(None),
        Some(bytes) => Ok(Some(monitor::decode(bytes).map_err(io::Error::other)?)),
    }
}

/// What a dead monitor left in the socket.
fn last_word(control: &OwnedFd) -> Option<FromMonitor> {
    while let Ok(Some(message)) = receive(control) {
        if matches!(message, FromMonitor::Stopped(_) | FromMonitor::Failed { .. }) {
            return Some(message);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_address_is_told_from_other_failures() {
        assert!(cid_taken("vsock device failed: context id 1033: Address already in use (os error 98)"));
        assert!(!cid_taken("vsock device failed: context id 1033: Bad address (os error 14)"));
        assert!(!cid_taken("listening failed: Address already in use (os error 98)"));
    }

    #[tokio::test]
    async fn the_end_of_a_process_that_says_nothing_is_told_by_its_status() {
        let child = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let pidfd = Arc::new(process::open(i32::try_from(child.id()).unwrap()).unwrap().unwrap());
        let (ours, _theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        let watched = Watched {
            pidfd: Arc::clone(&pidfd),
            child: Some(child),
            control: ours,
            oom_killed: Box::new(|| false),
        };
        let mut machine = watch(watched, "test".to_owned()).unwrap();
        process::kill_pidfd(&pidfd);
        let end = machine.ended().await;
        assert_eq!(
            end,
            MachineEnd::Ended(Reason::new("monitor_killed", "the monitor was killed by signal 9"))
        );
    }

    #[tokio::test]
    async fn a_monitor_s_last_word_is_heard_although_it_has_gone() {
        let child = Command::new("/bin/true").spawn().unwrap();
        let pidfd = Arc::new(process::open(i32::try_from(child.id()).unwrap()).unwrap().unwrap());
        let (ours, theirs) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        let booted = FromMonitor::Booted { configured_us: 1, vm_created_us: 2, booted_us: 3 };
        let word = FromMonitor::Stopped(StopReason::GuestCrash { detail: "triple fault".to_owned() });
        for message in [booted, word] {
            send(&theirs, &monitor::encode(&message).unwrap(), SendFlags::empty()).unwrap();
        }
        drop(theirs);
        let watched = Watched { pidfd, child: Some(child), control: ours, oom_killed: Box::new(|| false) };
        let mut machine = watch(watched, "test".to_owned()).unwrap();
        assert_eq!(machine.ended().await, MachineEnd::Ended(Reason::new("guest_crashed", "triple fault")));
        assert_eq!(machine.booted().map(|b| b.booted_us), Some(3));
    }
}
