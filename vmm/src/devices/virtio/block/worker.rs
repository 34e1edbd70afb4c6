//! Requests: a 16-byte header, data, and a status byte that the device writes last (section 5.2.6).
//!
//! The header is copied out of guest memory once and its range checked against the disk before anything is touched.
//! Data moves between the disk and guest memory without a copy in between; its pages are only ever seen as raw
//! addresses, since the guest may change them at any moment.

use super::{
    REQUEST_MAX, SECTOR, SEGMENTS_MAX,
    storage::{self, Storage},
};
use crate::{
    Error,
    devices::virtio::{
        chain::{self, Outside, Segment, Vectors},
        runner::Worker,
    },
    memory::Memory,
};
use std::{fs::File, io};
use virtio_queue::DescriptorChain;
use vm_memory::Bytes;

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
pub struct Disk<S = File> {
    pub file: S,
    pub bytes: u64,
    pub read_only: bool,
    /// Serial number the guest sees.
    pub name: &'static str,
}

pub struct BlockWorker<S = File> {
    pub(super) disk: Disk<S>,
    segments: Vec<Segment>,
    vectors: Vectors,
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidInput.into()
}

fn broken(why: &str) -> Error {
    Error::Guest { device: "block", why: why.to_owned() }
}

impl<S: Storage> BlockWorker<S> {
    pub fn new(disk: Disk<S>) -> Self {
        Self { disk, segments: Vec::with_capacity(CHAIN_MAX), vectors: Vectors::default() }
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.segments.capacity()
    }

    /// Carries out the request that `segments` are; returns what was written for the driver to read.
    fn request(&mut self, memory: &Memory, segments: &[Segment]) -> Result<u32, Error> {
        let [header, data @ .., status] = segments else {
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

    /// Status, and bytes written to data segments.
    fn carry_out(&mut self, memory: &Memory, kind: u32, sector: u64, data: &[Segment]) -> (Status, u32) {
        let outcome = match kind {
            REQUEST_IN => self.transfer(memory, sector, data, true),
            REQUEST_OUT if !self.disk.read_only => self.transfer(memory, sector, data, false).map(|_| 0),
            REQUEST_FLUSH if !self.disk.read_only => self.disk.file.flush().map(|()| 0),
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
        let total = chain::total(data);
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

        self.vectors.clear();
        for segment in data {
            let pushed = self.vectors.push_guest(memory, segment.address, segment.len as usize);
            pushed.map_err(|Outside| invalid())?;
        }
        storage::move_all(&mut self.disk.file, start, self.vectors.as_mut_slice(), to_guest)?;
        u32::try_from(total).map_err(|_| invalid())
    }

    fn identify(&self, memory: &Memory, data: &[Segment]) -> io::Result<u32> {
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

impl<S: Storage> Worker for BlockWorker<S> {
    fn name(&self) -> &'static str {
        "block"
    }

    fn serve(&mut self, memory: &Memory, chain: DescriptorChain<&Memory>) -> Result<u32, Error> {
        // Out of the worker for the length of the request, and back whatever came of it, with its capacity.
        let mut segments = std::mem::take(&mut self.segments);
        let gathered = chain::gather(chain, CHAIN_MAX, &mut segments).map_err(broken);
        let outcome = gathered.and_then(|()| self.request(memory, &segments));
        self.segments = segments;
        outcome
    }
}
