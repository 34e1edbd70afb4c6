//! Sandboxes that are alive: one task each, which carries out what the lifecycle decides.
//!
//! ```text
//!  HTTP ──▶ store.apply(input) ──▶ row + effects ──▶ the sandbox's task ──▶ machines
//!                  ▲                                        │
//!                  └──────────── what came of it ───────────┘
//! ```
//!
//! A delete is written by whoever asks for it and *seen* by the task, which drops what it is doing as soon as that can
//! be dropped and releases everything. What must never happen here: an effect before its row is durable, two tasks for
//! one sandbox, or a wait that a delete cannot end.

mod boot;
mod create;
mod live;
mod remove;
mod task;

pub use boot::Phases;
pub use create::{CreateRequest, Created, create, creation_result};
pub use live::{Live, View};
pub use remove::{delete, sweep, wait_released};
pub(crate) use task::{Work, follow, start};
