//! Every request path and every way to get one wrong, on mock rings.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod shapes;
mod storage;

use super::{BlockWorker, Disk, REQUEST_MAX, SECTOR, Storage};
use crate::{
    Error,
    devices::virtio::runner::{self, Worker},
    memory::Memory,
};
use std::{fs::File, io::Write, os::unix::fs::FileExt};
use virtio_queue::{
    Queue, QueueT,
    desc::{RawDescriptor, split::Descriptor},
    mock::MockSplitQueue,
};
use vm_memory::{Bytes, GuestAddress};

const MEMORY: usize = 0x80_0000;
const HEADER: u64 = 0x10_0000;
const STATUS: u64 = 0x10_1000;
const DATA: u64 = 0x20_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const UNTOUCHED: u8 = 0xee;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;

fn disk(bytes: u64, read_only: bool) -> Disk {
    let mut file: File = tempfile();
    let content: Vec<u8> = (0..bytes).map(|i| (i / SECTOR) as u8).collect();
    file.write_all(&content).unwrap();
    Disk { file, bytes, read_only, name: "root" }
}

fn tempfile() -> File {
    let memory = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from(memory)
}

fn memory() -> Memory {
    Memory::from_ranges(&[(GuestAddress(0), MEMORY)]).unwrap()
}

fn descriptor(address: u64, len: u32, flags: u16) -> RawDescriptor {
    RawDescriptor::from(Descriptor::new(address, len, flags, 0))
}

fn header(memory: &Memory, kind: u32, sector: u64) -> RawDescriptor {
    memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
    memory.write_obj(0_u32, GuestAddress(HEADER + 4)).unwrap();
    memory.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
    memory.write_obj(UNTOUCHED, GuestAddress(STATUS)).unwrap();
    descriptor(HEADER, 16, 0)
}

fn status() -> RawDescriptor {
    descriptor(STATUS, 1, WRITE)
}

/// Serves one chain: what came of it, and the status byte.
fn serve<S: Storage>(
    worker: &mut BlockWorker<S>,
    memory: &Memory,
    chain: &[RawDescriptor],
) -> (Result<u32, Error>, u8) {
    let queue = MockSplitQueue::create(memory, GuestAddress(0), 256);
    let chain = queue.build_desc_chain(chain).unwrap();
    let outcome = worker.serve(memory, chain);
    (outcome, memory.read_obj(GuestAddress(STATUS)).unwrap())
}

/// The same for a chain that is a request: what was written, and the status byte.
fn served<S: Storage>(worker: &mut BlockWorker<S>, memory: &Memory, chain: &[RawDescriptor]) -> (u32, u8) {
    let (outcome, status) = serve(worker, memory, chain);
    (outcome.unwrap(), status)
}

#[test]
fn a_read_brings_the_sectors_asked_for_across_segments() {
    let (memory, mut worker) = (memory(), BlockWorker::new(disk(64 * SECTOR, true)));
    let chain = [
        header(&memory, IN, 3),
        descriptor(DATA, 512, WRITE),
        descriptor(DATA + 0x1000, 1024, WRITE),
        status(),
    ];
    let (written, status) = serve(&mut worker, &memory, &chain);
    assert_eq!((written.unwrap(), status), (1537, 0));
    for (address, sector) in [(DATA, 3_u8), (DATA + 0x1000, 4), (DATA + 0x1200, 5)] {
        assert_eq!(memory.read_obj::<u8>(GuestAddress(address)).unwrap(), sector);
    }
}

#[test]
fn a_write_lands_where_it_was_meant_and_a_flush_answers() {
    let (memory, mut worker) = (memory(), BlockWorker::new(disk(8 * SECTOR, false)));
    let file = worker.disk.file.try_clone().unwrap();
    memory.write_slice(&[7; 1024], GuestAddress(DATA)).unwrap();
    let chain = [header(&memory, OUT, 2), descriptor(DATA, 1024, 0), status()];
    let (written, status_byte) = serve(&mut worker, &memory, &chain);
    assert_eq!((written.unwrap(), status_byte), (1, 0));
    let mut sectors = [0; 2048];
    file.read_exact_at(&mut sectors, 512).unwrap();
    assert!(sectors[..512].iter().all(|b| *b == 1) && sectors[512..1536].iter().all(|b| *b == 7));
    assert!(sectors[1536..].iter().all(|b| *b == 4));
    let chain = [header(&memory, FLUSH, 0), status()];
    let (written, status_byte) = serve(&mut worker, &memory, &chain);
    assert_eq!((written.unwrap(), status_byte), (1, 0));
}

#[test]
fn the_serial_number_is_the_disks_name() {
    let (memory, mut worker) = (memory(), BlockWorker::new(disk(SECTOR, true)));
    let chain = [header(&memory, GET_ID, 0), descriptor(DATA, 20, WRITE), status()];
    let (written, status) = serve(&mut worker, &memory, &chain);
    assert_eq!((written.unwrap(), status), (21, 0));
    let mut id = [0; 5];
    memory.read_slice(&mut id, GuestAddress(DATA)).unwrap();
    assert_eq!(&id, b"root\0");
}

/// What a mistaken driver may ask for gets an I/O error or "unsupported", and moves nothing.
#[test]
fn requests_the_disk_cannot_serve_are_answered_and_touch_nothing() {
    let io_error = 1;
    let unsupported = 2;
    for (read_only, kind, sector, segment, expected) in [
        (true, IN, 64, descriptor(DATA, 512, WRITE), io_error),
        (true, IN, 63, descriptor(DATA, 1024, WRITE), io_error),
        (true, IN, u64::MAX, descriptor(DATA, 512, WRITE), io_error),
        (true, IN, u64::MAX / 512, descriptor(DATA, 512, WRITE), io_error),
        (true, IN, 0, descriptor(DATA, 100, WRITE), io_error),
        (true, IN, 0, descriptor(DATA, 512, 0), io_error),
        (true, IN, 0, descriptor(MEMORY as u64 - 256, 512, WRITE), io_error),
        (true, IN, 0, descriptor(u64::MAX - 100, 512, WRITE), io_error),
        (true, OUT, 0, descriptor(DATA, 512, 0), unsupported),
        (true, FLUSH, 0, descriptor(DATA, 512, 0), unsupported),
        (true, 77, 0, descriptor(DATA, 512, WRITE), unsupported),
        (true, GET_ID, 0, descriptor(DATA, 20, 0), io_error),
        (false, OUT, 64, descriptor(DATA, 512, 0), io_error),
        (false, OUT, 0, descriptor(DATA, 512, WRITE), io_error),
        (false, OUT, 0, descriptor(DATA, 511, 0), io_error),
        (false, OUT, 0, descriptor(MEMORY as u64, 512, 0), io_error),
    ] {
        let (memory, mut worker) = (memory(), BlockWorker::new(disk(64 * SECTOR, read_only)));
        memory.write_slice(&[UNTOUCHED; 1024], GuestAddress(DATA)).unwrap();
        let (written, status) =
            serve(&mut worker, &memory, &[header(&memory, kind, sector), segment, status()]);
        assert_eq!((written.unwrap(), status), (1, expected), "kind {kind}, sector {sector}");
        let mut data = [0; 1024];
        memory.read_slice(&mut data, GuestAddress(DATA)).unwrap();
        assert_eq!(data, [UNTOUCHED; 1024], "kind {kind}, sector {sector}");
    }
}

#[test]
fn one_request_moves_no_more_than_the_limit() {
    let (memory, mut worker) = (memory(), BlockWorker::new(disk(REQUEST_MAX + SECTOR, true)));
    let data = |len: u64| descriptor(DATA, u32::try_from(len).unwrap(), WRITE);
    let (written, status_byte) =
        serve(&mut worker, &memory, &[header(&memory, IN, 0), data(REQUEST_MAX), status()]);
    assert_eq!((u64::from(written.unwrap()), status_byte), (REQUEST_MAX + 1, 0));
    let (written, status_byte) =
        serve(&mut worker, &memory, &[header(&memory, IN, 0), data(REQUEST_MAX + SECTOR), status()]);
    assert_eq!((written.unwrap(), status_byte), (1, 1));
}

/// What no driver does ends the machine, with a reason.
#[test]
fn requests_that_are_no_requests_end_the_machine() {
    let whole = |memory: &Memory| header(memory, IN, 0);
    for chain in [
        vec![status()],
        vec![whole(&memory())],
        vec![descriptor(HEADER, 16, WRITE), status()],
        vec![descriptor(HEADER, 15, 0), status()],
        vec![descriptor(HEADER, 16, 0), descriptor(STATUS, 1, 0)],
        vec![descriptor(HEADER, 16, 0), descriptor(STATUS, 2, WRITE)],
        vec![descriptor(MEMORY as u64, 16, 0), status()],
        vec![descriptor(HEADER, 16, 0), descriptor(MEMORY as u64, 1, WRITE)],
    ] {
        let (memory, mut worker) = (memory(), BlockWorker::new(disk(SECTOR, true)));
        whole(&memory);
        let (outcome, _) = serve(&mut worker, &memory, &chain);
        assert!(matches!(outcome, Err(Error::Guest { device: "block", .. })), "{outcome:?}");
    }
}

type Lie = fn(&Memory, &MockSplitQueue<Memory>);

/// A ring whose index runs ahead of its size, or whose entry names no descriptor, ends the machine; so does a chain that
/// never ends. None of them is followed for ever.
#[test]
fn a_ring_that_lies_ends_the_machine() {
    let lies: [(&str, Lie); 3] = [
        ("index ahead of the ring", |memory, queue| {
            memory.write_obj(600_u16, GuestAddress(queue.avail_addr().0 + 2)).unwrap();
        }),
        ("entry beyond the table", |memory, queue| {
            memory.write_obj(999_u16, GuestAddress(queue.avail_addr().0 + 4)).unwrap();
            memory.write_obj(1_u16, GuestAddress(queue.avail_addr().0 + 2)).unwrap();
        }),
        ("chain in a circle", |memory, queue| {
            header(memory, IN, 0);
            let own = RawDescriptor::from(Descriptor::new(HEADER, 16, NEXT, 0));
            queue.desc_table().store(0, own).unwrap();
            memory.write_obj(1_u16, GuestAddress(queue.avail_addr().0 + 2)).unwrap();
        }),
    ];
    for (what, lie) in lies {
        let (memory, mut worker) = (memory(), BlockWorker::new(disk(SECTOR, true)));
        let mock = MockSplitQueue::create(&memory, GuestAddress(0), 256);
        lie(&memory, &mock);
        let mut queue: Queue = mock.create_queue().unwrap();
        assert!(queue.is_valid(&memory));
        let outcome = runner::drain(&mut worker, &mut queue, &memory);
        assert!(matches!(outcome, Err(Error::Guest { .. })), "{what}: {outcome:?}");
    }
}
