//! Virtio 1.2 devices over the MMIO transport.
//!
//! ```text
//!  vCPU thread: MMIO exit ─▶ transport (registers, status machine) ──activate: queues move──▶ device
//!  guest kick  ─▶ ioeventfd ─▶ device thread ─▶ worker (ring and buffers only) ─▶ interrupt ─▶ irqfd
//! ```
//!
//! A device is a folder: `mod.rs` (what it is, its constants), `device.rs` (configuration space, activation, sleep, and
//! the glue to descriptors), `worker.rs` (ring processing over guest memory, with no descriptors of its own making, so
//! that it runs in tests without KVM). What is saved of a device is its transport's registers and its queues
//! ([`transport::TransportState`]): no device of ours has more state than that.

pub mod block;
mod chain;
pub mod entropy;
mod interrupt;
pub mod net;
pub mod runner;
pub mod transport;
pub mod vsock;

pub use interrupt::Interrupt;

use crate::{Error, memory::Memory};
use std::sync::Arc;
use virtio_queue::Queue;

/// Feature bits that belong to the transport and the rings (virtio 1.2, section 6).
pub mod feature {
    pub const INDIRECT_DESC: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const VERSION_1: u64 = 1 << 32;
    /// What every device of ours offers.
    pub const RING: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1;
}

/// What a device gets when its driver is ready: the negotiated features, its queues, and the way to interrupt.
pub struct Activation {
    pub features: u64,
    pub queues: Vec<Queue>,
    pub interrupt: Arc<Interrupt>,
    pub memory: Memory,
}

/// A device as its transport knows it. Called on vCPU threads, one call at a time.
pub trait Device: Send {
    /// The name used in errors.
    fn name(&self) -> &'static str;
    /// Virtio device id (section 5).
    fn id(&self) -> u32;
    /// Features offered.
    fn features(&self) -> u64;
    /// Largest size of each queue; the length is the number of queues.
    fn queue_sizes(&self) -> &[u16];
    /// Device configuration space, as the driver reads it.
    fn config(&self) -> &[u8];
    /// The driver is ready, or a sleeping machine wakes up: queues and memory move in, and are used until
    /// [`Device::sleep`]. The device begins by looking at every queue, as if all had been notified.
    fn activate(&mut self, activation: Activation) -> Result<(), Error>;
    /// Stops the work, with nothing left in flight, and gives the queues back as they stand. When this returns, guest
    /// memory is not touched any more.
    fn sleep(&mut self) -> Result<Vec<Queue>, Error>;
    /// The machine wakes up as another one than it was when it went to sleep. Called after [`Device::activate`] and
    /// before the guest runs.
    fn cloned(&mut self) -> Result<(), Error> {
        Ok(())
    }
}
