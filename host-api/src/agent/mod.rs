//! The daemon's side of the guest's agent.
//!
//! Everything a guest says is a claim by somebody hostile, but for one thing: the CID the host's kernel reports for its
//! connection. What must never happen here: a call without a deadline, or memory by a guest's measure beyond one frame.

mod announce;
mod call;
mod files;
pub mod wire;

pub use announce::{Announcements, Expected, listen};
pub use call::{AgentError, Agents, Pong, configure};
pub use files::{Download, Upload};
