//! Socket device (virtio 1.2, section 5.10) whose two data queues the host's kernel drives (vhost-vsock). The monitor
//! sees none of the traffic: it hands over memory, rings and descriptors, and keeps the event queue.

mod device;
mod event;
mod kernel;

pub use device::Vsock;

/// The name used in errors.
const DEVICE: &str = "vsock";
/// Virtio device id.
pub const DEVICE_ID: u32 = 19;
pub const QUEUE_SIZE: u16 = 256;
/// Receive, transmit, event.
pub const QUEUES: usize = 3;
/// Queues 0 and 1 are the kernel's.
pub const VHOST_QUEUES: usize = 2;
