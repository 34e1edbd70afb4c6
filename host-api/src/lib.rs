//! The daemon of Bivouac: HTTP, lifecycle, commands, templates, store, usage, audit.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`lifecycle`] | the pure core: what a sandbox may become |
//! | [`store`] | the journal |
//! | [`machine`] | the world of monitors, disks and cgroups |
//! | [`agent`] | the guest's side of the channel, as the daemon sees it |
//! | [`sandboxes`], [`commands`] | what carries out what the core decides |
//! | [`api`] | HTTP in and out of typed values |
//! | [`reconcile`] | the first thing after a start |
//!
//! No panic is reachable from a caller or a guest: the lints below hold for everything but tests.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic,
        clippy::string_slice
    )
)]

pub mod admission;
pub mod agent;
pub mod api;
pub mod auth;
pub mod clock;
pub mod commands;
mod connections;
pub mod daemon;
pub mod error;
pub mod ids;
pub mod lifecycle;
pub mod limits;
pub mod machine;
pub mod metrics;
pub mod reconcile;
pub mod reserve;
pub mod sandboxes;
pub mod serve;
pub mod spool;
pub mod store;
mod sync;
pub mod templates;
