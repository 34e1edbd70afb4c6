//! A chain of descriptors as the runs of guest memory it names, and as the vectors that `readv` and its kin take.
//!
//! What every device asks of a chain is checked here: it has an end, it is not longer than the device allows, and it lies in
//! guest memory. Both containers are kept from one request to the next, so that a request allocates nothing.

use crate::memory::Memory;
use virtio_queue::DescriptorChain;
use vm_memory::{GuestAddress, GuestMemoryBackend};

/// One run of guest memory.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    pub address: GuestAddress,
    pub len: u32,
    pub writable: bool,
}

/// Puts the segments of `chain` in place of what `segments` had, or says what is wrong with it.
///
/// A chain that ends with a promise of more goes round in a circle, leaves its table, lies outside memory or is above
/// 4 GiB: the iterator just stops there, and what it gave so far is no request.
pub fn gather(
    chain: DescriptorChain<&Memory>,
    limit: usize,
    segments: &mut Vec<Segment>,
) -> Result<(), &'static str> {
    segments.clear();
    let mut unfinished = true;
    for descriptor in chain {
        if segments.len() >= limit {
            return Err("a chain has more segments than the device allows");
        }
        unfinished = descriptor.has_next();
        segments.push(Segment {
            address: descriptor.addr(),
            len: descriptor.len(),
            writable: descriptor.is_write_only(),
        });
    }
    if unfinished { Err("a chain has no end, or leaves its table") } else { Ok(()) }
}

/// Bytes in all of `segments`.
pub fn total(segments: &[Segment]) -> u64 {
    segments.iter().fold(0, |sum: u64, segment| sum.saturating_add(u64::from(segment.len)))
}

/// Runs of this process's memory, for the kernel to read or write. Its pages may be the guest's, which changes them at
/// any moment, so nobody here looks at them through these addresses.
#[derive(Default)]
pub struct Vectors(Vec<libc::iovec>);

// SAFETY: the addresses mean the same on every thread, and whatever they point to is only touched by the kernel, in calls
// made while the memory behind them is borrowed.
unsafe impl Send for Vectors {}

/// Part of a request is not in guest memory.
#[derive(Debug)]
pub struct Outside;

impl Vectors {
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Adds a run of guest memory, which becomes two vectors if it straddles two regions.
    pub fn push_guest(&mut self, memory: &Memory, address: GuestAddress, len: usize) -> Result<(), Outside> {
        for slice in memory.get_slices(address, len) {
            let slice = slice.map_err(|_| Outside)?;
            self.0
                .push(libc::iovec { iov_base: slice.ptr_guard_mut().as_ptr().cast(), iov_len: slice.len() });
        }
        Ok(())
    }

    /// Adds `bytes`, which have to stay where they are until [`Vectors::clear`].
    pub fn push_own(&mut self, bytes: &mut [u8]) {
        self.0.push(libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() });
    }

    /// To be consumed from the front, as it is done.
    pub fn as_mut_slice(&mut self) -> &mut [libc::iovec] {
        &mut self.0
    }

    pub fn as_slice(&self) -> &[libc::iovec] {
        &self.0
    }
}
