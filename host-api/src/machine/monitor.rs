//! One monitor process: how it is started, spoken to and watched.
//!
//! The watch ends in one value, published when the process itself is gone. Nothing polls: the process is a pidfd, the
//! connection a socket, and both wake the same task.

use super::process::{self, Exit};
use super::{Booted, Machine, MachineEnd, MachineError};
use crate::lifecycle::Reason;
use bivouac_protocol::monitor::{self, FromMonitor, MAX_MESSAGE, StopReason, ToMonitor};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot, watch};

/// How long a monitor that has said its last word may take to go.
const LEAVE: Duration = Duration::from_secs(5);

/// Puts one message in the socket; it has room for it.
pub fn say(control: &OwnedFd, message: &ToMonitor) -> Result<(), MachineError> {
    say_with(control, message, &[])
}

/// The same, with descriptors that go along.
fn say_with(control: &OwnedFd, message: &ToMonitor, files: &[OwnedFd]) -> Result<(), MachineError> {
    let packet = monitor::encode(message)
        .map_err(|e| MachineError::Refused(format!("a message for the monitor could not be written: {e}")))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut along = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    if !files.is_empty() && !along.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(MachineError::Refused("too many descriptors for one message".to_owned()));
    }
    sendmsg(control, &[IoSlice::new(&packet)], &mut along, SendFlags::NOSIGNAL)
        .map_err(MachineError::os("speaking to the monitor"))?;
    Ok(())
}

/// Asked once the monitor is dead.
pub type OomKilled = Box<dyn Fn() -> bool + Send + Sync>;

/// A monitor as the watch sees it.
pub struct Watched {
    pub pidfd: Arc<OwnedFd>,
    /// It is our own child, and ours to reap.
    pub ours: bool,
    pub control: OwnedFd,
    /// It was asked something already, and the answer is for nobody.
    pub asked: bool,
    /// Whether the kernel killed it for want of memory.
    pub oom_killed: OomKilled,
}

/// Something to ask of a monitor, and where its answer goes.
#[derive(Debug)]
pub struct Ask {
    pub what: ToMonitor,
    pub files: Vec<OwnedFd>,
    pub reply: oneshot::Sender<FromMonitor>,
}

/// Requests under way at once, for one monitor.
const ASKS: usize = 8;

/// Watches a monitor to its end in a task of its own, which also asks it what is to be asked.
pub fn watch(watched: Watched, name: String) -> Result<Machine, MachineError> {
    let failed = || MachineError::io(format!("watching the monitor of {name}"));
    let alive = readable(watched.pidfd.try_clone().map_err(failed())?).map_err(failed())?;
    let control = readable(watched.control).map_err(failed())?;
    let (ours, asked, oom_killed) = (watched.ours, watched.asked, watched.oom_killed);
    let (end_tx, end_rx) = watch::channel(None);
    let (booted_tx, booted_rx) = watch::channel(None);
    let (ask_tx, ask_rx) = mpsc::channel(ASKS);
    tokio::spawn(async move {
        let said = converse(&control, &alive, &booted_tx, asked, ask_rx).await;
        if said.is_some() && tokio::time::timeout(LEAVE, gone(&alive)).await.is_err() {
            process::kill_pidfd(alive.get_ref());
        }
        gone(&alive).await;
        let status = if ours { process::reap(alive.get_ref()) } else { None };
        let end = ending(said, status, oom_killed());
        // Whether that is a fault is not known here: a release kills it as well. Whoever it takes by surprise says so.
        tracing::debug!(sandbox = %name, ?end, "monitor ended");
        end_tx.send_replace(Some(end));
    });
    Ok(Machine::new(end_rx, booted_rx, ask_tx))
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

fn ending(said: Option<FromMonitor>, status: Option<Exit>, oom_killed: bool) -> MachineEnd {
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

fn silent(status: Option<Exit>, oom_killed: bool) -> Reason {
    if oom_killed {
        return Reason::new(
            "host_memory_limit",
            "the machine went over its memory limit on the host and was killed",
        );
    }
    match status {
        Some(Exit::Signal(signal)) => {
            Reason::new("monitor_killed", format!("the monitor was killed by signal {signal}"))
        }
        Some(Exit::Code(VIOLATION)) => Reason::new(
            "jail_violation",
            "the monitor made a system call that its jail forbids; the sandbox's log has the number",
        ),
        Some(Exit::Code(code)) => {
            Reason::new("monitor_exited", format!("the monitor exited with code {code}"))
        }
        None => Reason::new("monitor_killed", "the monitor's process ended without a word"),
    }
}

/// Exit code of a monitor whose system call filter was hit: 128 and the number of `SIGSYS`.
const VIOLATION: i32 = 159;

/// Hears the monitor out: to its last message, the end of the connection, or the end of the process.
async fn converse(
    control: &AsyncFd<OwnedFd>,
    alive: &AsyncFd<OwnedFd>,
    booted: &watch::Sender<Option<Booted>>,
    asked: bool,
    mut asks: mpsc::Receiver<Ask>,
) -> Option<FromMonitor> {
    // Who waits for an answer, in the order of the questions, which is that of the answers.
    let mut waiting: VecDeque<oneshot::Sender<FromMonitor>> = VecDeque::new();
    if asked {
        // Else the first to ask would get the answer to what was asked before.
        waiting.push_back(oneshot::channel().0);
    }
    let mut asking = true;
    loop {
        let heard = tokio::select! {
            biased;
            heard = control.async_io(Interest::READABLE, receive) => heard,
            // Its last word may still lie in the socket.
            () = gone(alive) => return last_word(control.get_ref()),
            ask = asks.recv(), if asking && waiting.len() < ASKS => {
                match ask {
                    // Whoever asked learns by the dropped reply that nothing was asked.
                    Some(ask) => if say_with(control.get_ref(), &ask.what, &ask.files).is_ok() {
                        waiting.push_back(ask.reply);
                    },
                    None => asking = false,
                }
                continue;
            }
        };
        match heard {
            Ok(Some(FromMonitor::Booted(timing))) => {
                booted.send_replace(Some(timing));
            }
            Ok(Some(last @ (FromMonitor::Stopped(_) | FromMonitor::Failed { .. }))) => return Some(last),
            Ok(Some(answer)) => {
                if let Some(reply) = waiting.pop_front() {
                    let _ = reply.send(answer);
                }
            }
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
    use rustix::net::send;
    use std::process::Command;

    /// A child for the watch to reap.
    #[allow(clippy::zombie_processes)]
    fn child(program: &str, argument: &str) -> Arc<OwnedFd> {
        let child = Command::new(program).arg(argument).spawn().unwrap();
        Arc::new(process::open(i32::try_from(child.id()).unwrap()).unwrap().unwrap())
    }

    fn connection() -> (OwnedFd, OwnedFd) {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap()
    }

    fn watched(pidfd: &Arc<OwnedFd>, control: OwnedFd, asked: bool) -> Watched {
        let oom_killed = Box::new(|| false);
        Watched { pidfd: Arc::clone(pidfd), ours: true, control, asked, oom_killed }
    }

    #[test]
    fn a_taken_address_is_told_from_other_failures() {
        assert!(cid_taken("vsock device failed: context id 1033: Address already in use (os error 98)"));
        assert!(!cid_taken("vsock device failed: context id 1033: Bad address (os error 14)"));
        assert!(!cid_taken("listening failed: Address already in use (os error 98)"));
    }

    #[tokio::test]
    async fn the_end_of_a_process_that_says_nothing_is_told_by_its_status() {
        let pidfd = child("/bin/sleep", "60");
        let (ours, _theirs) = connection();
        let mut machine = watch(watched(&pidfd, ours, false), "test".to_owned()).unwrap();
        process::kill_pidfd(&pidfd);
        let end = machine.ended().await;
        assert_eq!(
            end,
            MachineEnd::Ended(Reason::new("monitor_killed", "the monitor was killed by signal 9"))
        );
    }

    #[tokio::test]
    async fn a_monitor_s_last_word_is_heard_although_it_has_gone() {
        let pidfd = child("/bin/true", "");
        let (ours, theirs) = connection();
        let booted = FromMonitor::Booted(Booted { booted_us: 3, ..Booted::default() });
        let word = FromMonitor::Stopped(StopReason::GuestCrash { detail: "triple fault".to_owned() });
        for message in [booted, word] {
            send(&theirs, &monitor::encode(&message).unwrap(), SendFlags::empty()).unwrap();
        }
        drop(theirs);
        let mut machine = watch(watched(&pidfd, ours, false), "test".to_owned()).unwrap();
        assert_eq!(machine.ended().await, MachineEnd::Ended(Reason::new("guest_crashed", "triple fault")));
        assert_eq!(machine.booted().map(|b| b.booted_us), Some(3));
    }

    /// A machine that is found is told to go on before anybody asks it anything.
    #[tokio::test]
    async fn an_answer_that_nobody_waits_for_is_not_taken_for_the_next_one() {
        let pidfd = child("/bin/sleep", "60");
        let (ours, theirs) = connection();
        let machine = watch(watched(&pidfd, ours, true), "test".to_owned()).unwrap();
        let answers = async {
            // Only once the question is there: until then both answers could be heard too early.
            while recv(&theirs, [0_u8; 64].as_mut_slice(), RecvFlags::DONTWAIT).is_err() {
                tokio::task::yield_now().await;
            }
            for answer in [FromMonitor::Resumed, FromMonitor::Paused] {
                send(&theirs, &monitor::encode(&answer).unwrap(), SendFlags::empty()).unwrap();
            }
        };
        let (answer, ()) = tokio::join!(machine.ask(ToMonitor::Pause, Vec::new()), answers);
        assert_eq!(answer.unwrap(), FromMonitor::Paused);
        process::kill_pidfd(&pidfd);
    }
}
