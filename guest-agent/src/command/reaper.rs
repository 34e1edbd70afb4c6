//! The one place that reaps. PID 1 inherits every orphan; a leader's status goes to whoever runs that command, and
//! nobody else ever calls `wait`.

use std::{cell::RefCell, collections::HashMap, io, mem::MaybeUninit, rc::Rc};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

/// How a leader ended.
#[derive(Debug, Clone, Copy)]
pub struct Status {
    /// As `wait4` gives it.
    pub raw: libc::c_int,
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_kib: u64,
}

#[derive(Debug, Clone, Default)]
pub struct Reaper {
    leaders: Rc<RefCell<HashMap<libc::pid_t, oneshot::Sender<Status>>>>,
}

impl Reaper {
    /// To be called in the same breath as the start: no status is collected between two awaits of this thread.
    pub fn expect(&self, pid: libc::pid_t) -> oneshot::Receiver<Status> {
        let (sender, receiver) = oneshot::channel();
        self.leaders.borrow_mut().insert(pid, sender);
        receiver
    }

    /// Reaps for ever.
    pub async fn run(self, mut after_each_round: impl FnMut()) -> io::Result<()> {
        let mut children = signal(SignalKind::child())?;
        loop {
            self.reap_all();
            after_each_round();
            // Signals coalesce, so each one means "at least one", and all are collected above.
            if children.recv().await.is_none() {
                return Err(io::Error::other("the signal driver is gone"));
            }
        }
    }

    fn reap_all(&self) {
        loop {
            let mut raw = 0;
            let mut usage = MaybeUninit::<libc::rusage>::zeroed();
            // SAFETY: both pointers are to live locals of the types the call fills in.
            let pid = unsafe { libc::wait4(-1, &raw mut raw, libc::WNOHANG, usage.as_mut_ptr()) };
            if pid <= 0 {
                return;
            }
            // SAFETY: all zeroes is a valid `rusage`, and the call only wrote to it.
            let usage = unsafe { usage.assume_init() };
            if let Some(leader) = self.leaders.borrow_mut().remove(&pid) {
                let status = Status {
                    raw,
                    user_us: micros(usage.ru_utime),
                    system_us: micros(usage.ru_stime),
                    max_rss_kib: u64::try_from(usage.ru_maxrss).unwrap_or(0),
                };
                let _ = leader.send(status);
            }
        }
    }
}

fn micros(time: libc::timeval) -> u64 {
    u64::try_from(time.tv_sec)
        .unwrap_or(0)
        .saturating_mul(1_000_000)
        .saturating_add(u64::try_from(time.tv_usec).unwrap_or(0))
}
