//! Where commands live, and how the agent outlives them when memory or process ids run out.
//!
//! The agent stays in the root cgroup; every command gets a cgroup of its own below [`COMMANDS`], which as a whole may
//! take all but a reserve of the machine's memory and processes. What runs out then runs out there. Of processes one
//! command may have a share: a fork bomb that somebody left behind does not keep the next command from starting.

use super::Error;
use std::{fs, sync::OnceLock};

const ROOT: &str = "/sys/fs/cgroup";
pub const COMMANDS: &str = "/sys/fs/cgroup/commands";

/// Memory that commands cannot have, in bytes: the agent's own, and what the kernel needs to go on.
const RESERVED_MEMORY: u64 = 12 << 20;
/// Process ids that commands cannot have.
const RESERVED_PIDS: u64 = 64;
/// One command may have this part of what all may have, so that several bombs at once leave room for other commands.
const SHARE_OF_PIDS: u64 = 8;
/// But no fewer than this, so that an ordinary build or test run fits into the smallest machine.
const FEWEST_PIDS: u64 = 128;

pub fn prepare() -> Result<(), Error> {
    // Each on its own: a kernel without one of them still has the others.
    let controllers = ["+memory", "+pids", "+cpu", "+io"];
    for controller in controllers {
        let _ = fs::write(format!("{ROOT}/cgroup.subtree_control"), controller);
    }
    fs::create_dir(COMMANDS).map_err(Error::io("make the commands' cgroup"))?;
    for controller in controllers {
        let _ = fs::write(format!("{COMMANDS}/cgroup.subtree_control"), controller);
    }
    if let Some(total) = total_memory() {
        let limit = total.saturating_sub(RESERVED_MEMORY).max(total / 2);
        let _ = fs::write(format!("{COMMANDS}/memory.max"), limit.to_string());
    }
    if let Some(limit) = pids_of_all() {
        let _ = fs::write(format!("{COMMANDS}/pids.max"), limit.to_string());
    }
    // The kernel's choice, when the whole machine is out of memory, is anybody else.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    Ok(())
}

/// Processes and threads that all commands together may have.
fn pids_of_all() -> Option<u64> {
    let threads = read_number("/proc/sys/kernel/threads-max")?;
    let pids = read_number("/proc/sys/kernel/pid_max")?;
    threads.min(pids).checked_sub(RESERVED_PIDS)
}

/// Processes and threads that one command may have.
pub fn pids_of_one() -> Option<u64> {
    static ONE: OnceLock<Option<u64>> = OnceLock::new();
    *ONE.get_or_init(|| pids_of_all().map(share))
}

fn share(all: u64) -> u64 {
    (all / SHARE_OF_PIDS).max(FEWEST_PIDS).min(all)
}

fn total_memory() -> Option<u64> {
    let info = rustix::system::sysinfo();
    info.totalram.checked_mul(u64::from(info.mem_unit))
}

fn read_number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_bombs_at_once_leave_room_for_another_command() {
        // As many as machines of 128 MiB, 512 MiB and 64 GiB have.
        for all in [750, 3_500, 500_000] {
            let one = share(all);
            assert!(one >= FEWEST_PIDS && one.saturating_mul(5) < all, "{one} of {all}");
        }
        assert_eq!(share(100), 100, "never more than there are");
    }
}
