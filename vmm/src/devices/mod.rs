//! Everything the guest can talk to.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

pub mod legacy;
pub mod virtio;
