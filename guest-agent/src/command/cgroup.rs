//! A command's cgroup: where it is started, how all of it is ended, and which limit it hit.

use crate::init::{COMMANDS_CGROUP, pids_of_one};
use bivouac_protocol::agent::Limit;
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};
use tokio::io::{Interest, unix::AsyncFd};

#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// `id` has been checked to be a plain name.
    pub fn create(id: &str) -> io::Result<Self> {
        let path = Path::new(COMMANDS_CGROUP).join(id);
        fs::create_dir(&path)?;
        // Memory that runs out takes the command as a whole, not one process of it at random.
        let _ = fs::write(path.join("memory.oom.group"), "1");
        if let Some(limit) = pids_of_one() {
            let _ = fs::write(path.join("pids.max"), limit.to_string());
        }
        Ok(Self { path })
    }

    /// For `CLONE_INTO_CGROUP`.
    pub fn open(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// Sends a signal to every process in it.
    pub fn signal(&self, signal: libc::c_int) {
        let procs = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        for pid in procs.lines().filter_map(|line| line.parse::<libc::pid_t>().ok()).filter(|pid| *pid > 1) {
            // SAFETY: takes numbers only.
            unsafe { libc::kill(pid, signal) };
        }
    }

    /// KILL to every process in it, at once, those being forked included.
    pub fn kill(&self) {
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
    }

    /// Whether the kernel ended a process in it for want of memory.
    pub fn oom_killed(&self) -> bool {
        self.counted("memory.events", "oom_kill")
    }

    /// What processes in it ran out of, so far.
    pub fn limits_hit(&self) -> Vec<Limit> {
        [
            (Limit::Memory, self.oom_killed()),
            // Of its own limit and of that of all commands: the file counts the refusals in here (see the mount).
            (Limit::Pids, self.counted("pids.events", "max")),
        ]
        .into_iter()
        .filter_map(|(limit, hit)| hit.then_some(limit))
        .collect()
    }

    fn counted(&self, file: &str, event: &str) -> bool {
        fs::read_to_string(self.path.join(file)).is_ok_and(|events| counted(&events, event))
    }

    fn populated(&self) -> bool {
        fs::read_to_string(self.path.join("cgroup.events")).is_ok_and(|events| events.contains("populated 1"))
    }

    /// Returns when no process is left in it.
    pub async fn emptied(&self) {
        let Ok(events) = File::open(self.path.join("cgroup.events")) else { return };
        // SAFETY: the registration owns the file, which stays open until it is deregistered.
        let Ok(events) = (unsafe { AsyncFd::register_with_interest(events, Interest::PRIORITY) }) else {
            return;
        };
        while self.populated() {
            // The kernel announces a change of the file as priority data.
            match events.ready(Interest::PRIORITY).await {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => return,
            }
        }
    }

    /// Removes it, if it is empty.
    pub fn remove(&self) -> bool {
        fs::remove_dir(&self.path).is_ok()
    }
}

/// Whether a file of `name count` lines counts at least one of `event`.
fn counted(events: &str, event: &str) -> bool {
    events
        .lines()
        .filter_map(|line| line.split_once(' '))
        .any(|(name, count)| name == event && count.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn an_event_counts_under_its_own_name_only() {
        let events = "low 0\nhigh 0\nmax 12\noom 1\noom_kill 0\noom_group_kill 0\n";
        assert!(counted(events, "max") && counted(events, "oom"));
        assert!(!counted(events, "oom_kill") && !counted(events, "nothing") && !counted("", "max"));
    }
}
