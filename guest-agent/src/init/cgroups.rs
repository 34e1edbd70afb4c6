//! Where commands live, and how the agent outlives them when memory or process ids run out.
//!
//! The agent stays in the root cgroup; every command gets a cgroup of its own below [`COMMANDS`], which as a whole may
//! take all but a reserve of the machine's memory and processes. What runs out then runs out there.

use super::Error;
use std::fs;

const ROOT: &str = "/sys/fs/cgroup";
pub const COMMANDS: &str = "/sys/fs/cgroup/commands";

/// Memory that commands cannot have, in bytes: the agent's own, and what the kernel needs to go on.
const RESERVED_MEMORY: u64 = 12 << 20;
/// Process ids that commands cannot have.
const RESERVED_PIDS: u64 = 64;

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
    let threads = read_number("/proc/sys/kernel/threads-max").unwrap_or(u64::MAX);
    let pids = read_number("/proc/sys/kernel/pid_max").unwrap_or(u64::MAX);
    if let Some(limit) = threads.min(pids).checked_sub(RESERVED_PIDS) {
        let _ = fs::write(format!("{COMMANDS}/pids.max"), limit.to_string());
    }
    // The kernel's choice, when the whole machine is out of memory, is anybody else.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    Ok(())
}

fn total_memory() -> Option<u64> {
    let info = rustix::system::sysinfo();
    info.totalram.checked_mul(u64::from(info.mem_unit))
}

fn read_number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
