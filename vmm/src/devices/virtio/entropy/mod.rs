//! Entropy device (virtio 1.2, section 5.4): random bytes from the host's kernel.

mod device;
#[cfg(test)]
mod tests;
mod worker;

pub use device::Entropy;
pub use worker::EntropyWorker;

/// Virtio device id.
pub const DEVICE_ID: u32 = 4;
pub const QUEUE_SIZE: u16 = 16;
/// Bytes given for one request, whatever it asks for: as many as `getrandom` returns without ever being interrupted.
pub const REQUEST_MAX: usize = 256;
