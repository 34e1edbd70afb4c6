//! What the parts of Bivouac say to each other: daemon and agent over vsock ([`agent`]), daemon and monitor over
//! an inherited socket ([`monitor`]).
//!
//! Messages are serde types in postcard's encoding, which does not describe itself: a version goes first on every
//! connection, and a side that meets another version says so and hangs up. This crate does no I/O of its own beyond
//! [`std::io::Read`] and [`std::io::Write`].

pub mod agent;
pub mod frame;
pub mod monitor;
