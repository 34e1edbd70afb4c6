//! A daemon under test and a client that knows nothing but the API.
//!
//! Each [`Host`] is a `bivouacd` of its own with a data folder of its own; [`shared`] is the one that most tests use.
//! A host that goes out of scope deletes what is left and fails the test that leaves a process behind.

pub mod client;
pub mod host;

pub use client::{Client, Reply};
pub use host::{Host, shared};
