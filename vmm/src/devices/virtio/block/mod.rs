//! Block device (virtio 1.2, section 5.2): the template's image read-only, and the sandbox's own disk. Raw images only,
//! of a length fixed when the machine starts. A flush returns after `fdatasync`.

mod device;
mod storage;
#[cfg(test)]
mod tests;
mod worker;

pub use device::Block;
pub use storage::Storage;
pub use worker::{BlockWorker, Disk};

/// Virtio device id.
pub const DEVICE_ID: u32 = 2;
pub const QUEUE_SIZE: u16 = 256;
/// Data segments a request may have: what is left of a ring after header and status.
pub const SEGMENTS_MAX: u32 = 254;
pub const SECTOR: u64 = 512;
/// Bytes one request may move. Linux asks for 1280 KiB at the most by default; a driver that asks for more gets an I/O
/// error, and the monitor's time for one request stays bounded.
pub const REQUEST_MAX: u64 = 4 << 20;

/// Feature bits (section 5.2.3).
pub mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const FLUSH: u64 = 1 << 9;
}
