//! The lifecycle of a sandbox, as values.
//!
//! This is the one place that decides what a sandbox may become. It takes the state and an input and returns the next
//! state and the effects to carry out; it performs none of them, reads no clock and knows no store, so that the same
//! code runs in production and under a model checker.
//!
//! ```text
//!  accept ─▶ creating ──usable──▶ running ──suspend─▶ suspending ─▶ suspended ──resume─▶ resuming ─▶ running
//!               │                    │  (it died by itself, or could not be made)
//!               └──────▶ failed ◀────┘
//!  any state ── delete ─▶ deleting ── released ─▶ deleted
//! ```
//!
//! What must never happen here: I/O, an await, a panic, or a path that leads out of `deleting` to anything but
//! `deleted`.

mod state;
mod step;
#[cfg(test)]
mod tests;

pub use state::{Deletion, DeletionReason, Failure, Holds, Reason, Record, State, UnixMs};
pub use step::{Input, Journal, LossReason, Scope, Step, World, step};
