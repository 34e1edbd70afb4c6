//! The monitor: one process, one microVM.
//!
//! It is the wall between code nobody reviewed and the host. It knows KVM, virtio and the jail, and nothing of HTTP,
//! organizations or templates: it is handed open descriptors and one [`bivouac_protocol::monitor::BootConfig`], runs
//! the machine, and says why it ended.
//!
//! Threads: one per vCPU, one that serves the devices' queues, and the main thread, which holds the conversation with
//! the daemon. Each has a system call filter of its own ([`jail::seccomp`]).
//! Whatever a guest supplies is checked once, where it enters ([`devices::virtio::transport`] for registers,
//! each device's `worker` for rings and buffers); a guest that breaks a rule ends its own machine with a reason.

pub mod boot;
pub mod bus;
pub mod control;
pub mod cpu;
pub mod devices;
pub mod ending;
pub mod error;
pub mod jail;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod probe;
mod reception;
pub mod snapshot;

pub use error::Error;
