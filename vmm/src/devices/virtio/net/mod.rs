//! Network device (virtio 1.2, section 5.1) over a tap that the monitor is handed open: it makes no interface, gives none an
//! address and filters nothing. What a guest may reach is decided by the host, outside, on the other side of the tap.
//!
//! Frames move between tap and guest memory without a copy in between. Only the 12-byte header of a frame is copied, checked
//! against what the driver negotiated, and the copy used: a guest cannot have the host's kernel parse a kind of frame that
//! it did not agree to send.
//!
//! Receive buffers are not merged (`VIRTIO_NET_F_MRG_RXBUF`), so that one chain is one frame: nothing is read from the tap
//! before there is a chain with room for whatever it may hold.

mod device;
mod runner;
mod tap;
#[cfg(test)]
mod tests;
mod worker;

pub use device::Net;
pub use runner::pair;
pub use tap::Tap;
pub use worker::{Frames, NetWorker, Pass, Pause};

/// Virtio device id.
pub const DEVICE_ID: u32 = 1;
/// Receive, transmit.
pub const QUEUES: usize = 2;
pub const RECEIVE: usize = 0;
pub const TRANSMIT: usize = 1;
/// A driver that takes large frames fills the receive queue with 64 KiB buffers when the interface comes up, so that
/// queue is short: 4 MiB of guest memory. The tap has a queue of its own.
pub const QUEUE_SIZES: [u16; QUEUES] = [64, 256];
/// `struct virtio_net_hdr_v1` (section 5.1.6).
pub const HEADER_LEN: usize = 12;
/// Largest frame either way, header not counted: 64 KiB of IP and an Ethernet header (section 5.1.6.3.1).
pub const FRAME_MAX: usize = 65_550;
/// Largest frame where large ones were not negotiated, beyond the MTU: Ethernet header and a VLAN tag.
pub const FRAMING: usize = 18;
/// Segments a chain may have: a whole ring of them.
pub const SEGMENTS_MAX: usize = 256;
/// Frames moved one way before the other way, and every other device, gets its turn.
pub const BUDGET: usize = 64;
/// What the MTU may be (section 5.1.4.1 has 68; IPv6 needs 1280).
pub const MTU: std::ops::RangeInclusive<u16> = 1280..=65_521;

/// Feature bits (section 5.1.3).
pub mod feature {
    pub const CSUM: u64 = 1 << 0;
    pub const GUEST_CSUM: u64 = 1 << 1;
    pub const MTU: u64 = 1 << 3;
    pub const MAC: u64 = 1 << 5;
    pub const GUEST_TSO4: u64 = 1 << 7;
    pub const GUEST_TSO6: u64 = 1 << 8;
    pub const HOST_TSO4: u64 = 1 << 11;
    pub const HOST_TSO6: u64 = 1 << 12;
}
