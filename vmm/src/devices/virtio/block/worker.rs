//! Requests: a 16-byte header, data, and a status byte that the device writes last (section 5.2.6).
//!
//! The header is copied out of guest memory once and its range checked against the disk before anything is touched.
//! Data moves between the disk and guest memory without a copy in between; its pages are only ever seen as raw
//! addresses, since the guest may change them at any moment.

use super::{REQUEST_MAX, SECTOR, SEGMENTS_MAX};
use crate::{Error, devices::virtio::runner::Worker, memory::Memory};
use std::{fs::File, io, os::fd::AsRawFd};
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

const REQUEST_IN: u32 = 0;
const REQUEST_OUT: u32 = 1;
const REQUEST_FLUSH: u32 = 4;
const REQUEST_GET_ID: u32 = 8;
const HEADER_LEN: u32 = 16;
const ID_LEN: usize = 20;
/// Header, data segments, status.
const CHAIN_MAX: usize = SEGMENTS_MAX as usize + 2;

/// Status byte (section 5.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// What a block device reads and writes.
pub struct Disk {
    pub file: File,
    pub bytes: u64,
    pub read_only: bool,
    /// Serial number the guest sees.
    pub name: &'static str,
}

pub struct BlockWorker {
    pub(super) disk: Disk,
}

/// One run of guest memory.
#[derive(Debug, Clone, Copy)]
struct Segment {
    address: GuestAddress,
    len: u32,
    writable: bool,
}

impl BlockWorker {
    pub fn new(disk: Disk) -> Self {
        Self { disk }
    }

    /// Status, and bytes written to data segments.
    fn carry_out(&mut self, memory: &Memory, kind: u32, sector: u64, data: &[Segment]) -> (Status, u32) {
        let outcome = match kind {
            REQUEST_IN => self.transfer(memory, sector, data, true),
            REQUEST_OUT if !self.disk.read_only => self.transfer(memory, sector, data, false).map(|_| 0),
            REQUEST_FLUSH if !self.disk.read_only => self.disk.file.sync_data().map(|()| 0),
            REQUEST_GET_ID => self.identify(memory, data),
            _ => return (Status::Unsupported, 0),
        };
        outcome.map_or((Status::IoError, 0), |written| (Status::Ok, written))
    }

    fn transfer(
        &mut self,
        memory: &Memory,
        sector: u64,
        data: &[Segment],
        to_guest: bool,
    ) -> io::Result<u32> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let total: u64 = data.iter().map(|segment| u64::from(segment.len)).sum();
        let start = sector.checked_mul(SECTOR).ok_or_else(invalid)?;
        let end = start.checked_add(total).ok_or_else(invalid)?;
        if end > self.disk.bytes || !total.is_multiple_of(SECTOR) || total > REQUEST_MAX {
            return Err(invalid());
        }
        if data.iter().any(|segment| segment.writable != to_guest) {
            return Err(invalid());
        }
        if total == 0 {
            return Ok(0);
        }

        let mut vectors = Vec::with_capacity(data.len());
        for segment in data {
            // A segment may straddle two regions of guest memory, and then becomes two vectors.
            for slice in memory.get_slices(segment.address, segment.len as usize) {
                let slice = slice.map_err(|_| invalid())?;
                vectors.push(libc::iovec {
                    iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                    iov_len: slice.len(),
                });
            }
        }
        move_all(&self.disk.file, start, &mut vectors, to_guest)?;
        u32::try_from(total).map_err(|_| invalid())
    }

    fn identify(&self, memory: &Memory, data: &[Segment]) -> io::Result<u32> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let [segment] = data else { return Err(invalid()) };
        let mut id = [0; ID_LEN];
        for (slot, byte) in id.iter_mut().zip(self.disk.name.bytes()) {
            *slot = byte;
        }
        let id = id.get(..(segment.len as usize).min(ID_LEN)).unwrap_or_default();
        if !segment.writable {
            return Err(invalid());
        }
        memory.write_slice(id, segment.address).map_err(|_| invalid())?;
        u32::try_from(id.len()).map_err(|_| invalid())
    }
}

/// Moves every byte, in as many calls as it takes.
fn move_all(file: &File, start: u64, mut vectors: &mut [libc::iovec], to_guest: bool) -> io::Result<()> {
    let mut offset = libc::off_t::try_from(start).map_err(|_| io::ErrorKind::InvalidInput)?;
    while !vectors.is_empty() {
        let count = libc::c_int::try_from(vectors.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: each vector is a run of guest memory, mapped for as long as the machine lives, and the kernel is the
        // only one that reads or writes through these addresses: no Rust reference to that memory exists.
        let moved = unsafe {
            if to_guest {
                libc::preadv(file.as_raw_fd(), vectors.as_ptr(), count, offset)
            } else {
                libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), count, offset)
            }
        };
        match usize::try_from(moved) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => {
                offset = offset.saturating_add(libc::off_t::try_from(bytes).unwrap_or(libc::off_t::MAX));
                vectors = advance(vectors, bytes);
            }
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
    Ok(())
}

/// What is left of `vectors` once their first `bytes` bytes are done.
pub(super) fn advance(vectors: &mut [libc::iovec], mut bytes: usize) -> &mut [libc::iovec] {
    let mut whole: usize = 0;
    for vector in vectors.iter() {
        let Some(rest) = bytes.checked_sub(vector.iov_len) else { break };
        bytes = rest;
        whole = whole.saturating_add(1);
    }
    let rest = vectors.get_mut(whole..).unwrap_or_default();
    if let Some(first) = rest.first_mut() {
        first.iov_len = first.iov_len.saturating_sub(bytes);
        first.iov_base = first.iov_base.cast::<u8>().wrapping_add(bytes).cast();
    }
    rest
}

impl Worker for BlockWorker {
    fn name(&self) -> &'static str {
        "block"
    }

    fn serve(&mut self, memory: &Memory, chain: DescriptorChain<&Memory>) -> Result<u32, Error> {
        let broken = |why: &str| Error::Guest { device: "block", why: why.to_owned() };
        let mut segments = Vec::with_capacity(4);
        for descriptor in chain {
            if segments.len() >= CHAIN_MAX {
                return Err(broken("a request has more segments than the device allows"));
            }
            segments.push(Segment {
                address: descriptor.addr(),
                len: descriptor.len(),
                writable: descriptor.is_write_only(),
            });
        }
        let [header, data @ .., status] = segments.as_slice() else {
            return Err(broken("a request lacks its header or its status byte"));
        };
        if header.writable || header.len != HEADER_LEN {
            return Err(broken("a request's header is not 16 readable bytes"));
        }
        if !status.writable || status.len != 1 {
            return Err(broken("a request does not end in one writable status byte"));
        }
        let outside = |_| broken("a request lies outside memory");
        let header: [u32; 4] = memory.read_obj(header.address).map_err(outside)?;
        let [kind, _, sector_low, sector_high] = header.map(u32::from_le);
        let sector = (u64::from(sector_high) << 32) | u64::from(sector_low);
        let (outcome, written) = self.carry_out(memory, kind, sector, data);
        memory.write_obj(outcome as u8, status.address).map_err(outside)?;
        Ok(written.saturating_add(1))
    }
}
