//! Commands: run at most once, whatever happens to callers, connections and daemons.
//!
//! ```text
//!  accept (a row, durable) ─▶ drive (a task of its own) ─▶ record the end (one transaction) ─▶ let the guest forget
//!                                   ▲
//!  daemon restart ─▶ settle: ask the agent. Known: attach. Unknown: it never ran, start it. Machine gone: lost.
//! ```
//!
//! The run belongs to no HTTP connection: callers watch it. What must never happen here: anything sent to a guest before
//! the row is durable, or a second run.

mod drive;
mod outcome;
mod output;
mod submit;

pub use output::{Kept, OutputReader, StreamName};
pub use submit::{Submission, Submitted, current, overlaid, submit, wait_end, watchdog};

pub(crate) use drive::settle;

/// How far a command has come, for those who wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// The agent has started it.
    pub started: bool,
    /// Its end is recorded.
    pub ended: bool,
    /// Bytes recorded of each stream.
    pub stdout: u64,
    pub stderr: u64,
}
