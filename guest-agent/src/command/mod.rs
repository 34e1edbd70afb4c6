//! Commands: a leader in a session, process group and cgroup of its own, and what it wrote.
//!
//! A command ends when its leader does. Ending one (timeout, cancel) ends everything in its cgroup, so that a process
//! that left the group or the session does not survive it.

mod cgroup;
mod pump;
mod reaper;
mod run;
mod spawn;
mod spool;
mod table;

use reaper::Reaper;
pub use run::Commands;
use spool::Spool;
pub use table::Command;
use table::Table;
