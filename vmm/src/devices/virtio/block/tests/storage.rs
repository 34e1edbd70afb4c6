//! What reaches the storage, call by call, and what the driver is told when the storage fails.

use super::*;
use crate::devices::virtio::block::{Storage, storage::advance};
use std::{collections::VecDeque, io};

/// Sixteen sectors that keep a record of every call, and fail as told.
struct Script {
    bytes: Vec<u8>,
    calls: Vec<Call>,
    /// What the next calls that move data do, in order; then they move everything.
    outcomes: VecDeque<Outcome>,
    flush_fails: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Call {
    Read { offset: u64, len: usize },
    Write { offset: u64, len: usize },
    Flush,
}

enum Outcome {
    /// Moves no more than this.
    Short(usize),
    Fails(io::ErrorKind),
}

const SECTORS: u64 = 16;

impl Script {
    fn worker() -> BlockWorker<Script> {
        let bytes = SECTORS * SECTOR;
        let content = (0..bytes).map(|at| (at / SECTOR) as u8).collect();
        let file =
            Script { bytes: content, calls: Vec::new(), outcomes: VecDeque::new(), flush_fails: false };
        BlockWorker::new(Disk { file, bytes, read_only: false, name: "scratch" })
    }

    fn transfer(
        &mut self,
        vectors: &[libc::iovec],
        offset: u64,
        copy: fn(&mut [u8], *mut u8),
    ) -> io::Result<usize> {
        let mut left = match self.outcomes.pop_front() {
            Some(Outcome::Fails(kind)) => return Err(kind.into()),
            Some(Outcome::Short(bytes)) => bytes,
            None => usize::MAX,
        };
        let mut at = usize::try_from(offset).unwrap();
        for vector in vectors {
            let now = vector.iov_len.min(left);
            copy(&mut self.bytes[at..at + now], vector.iov_base.cast());
            (at, left) = (at + now, left - now);
        }
        Ok(at - usize::try_from(offset).unwrap())
    }
}

fn len(vectors: &[libc::iovec]) -> usize {
    vectors.iter().map(|vector| vector.iov_len).sum()
}

impl Storage for Script {
    fn read(&mut self, vectors: &[libc::iovec], offset: u64) -> io::Result<usize> {
        self.calls.push(Call::Read { offset, len: len(vectors) });
        self.transfer(vectors, offset, |own, guest| {
            // SAFETY: the vector is memory of this test, and at least that long.
            unsafe { std::ptr::copy_nonoverlapping(own.as_ptr(), guest, own.len()) };
        })
    }

    fn write(&mut self, vectors: &[libc::iovec], offset: u64) -> io::Result<usize> {
        self.calls.push(Call::Write { offset, len: len(vectors) });
        self.transfer(vectors, offset, |own, guest| {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(guest, own.as_mut_ptr(), own.len()) };
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.calls.push(Call::Flush);
        if self.flush_fails { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }
}

#[test]
fn each_flush_reaches_the_medium_once_and_a_write_alone_does_not() {
    let (memory, mut worker) = (memory(), Script::worker());
    let write = [header(&memory, OUT, 2), descriptor(DATA, 512, 0), status()];
    assert_eq!(served(&mut worker, &memory, &write), (1, 0));
    // A flush has no place on the disk and no data; whatever a driver puts there is not looked at.
    for flush in [
        vec![header(&memory, FLUSH, 0), status()],
        vec![header(&memory, FLUSH, u64::MAX), descriptor(DATA, 512, 0), status()],
    ] {
        header(&memory, FLUSH, u64::MAX);
        assert_eq!(served(&mut worker, &memory, &flush), (1, 0));
    }
    let written = Call::Write { offset: 1024, len: 512 };
    assert_eq!(worker.disk.file.calls, [written, Call::Flush, Call::Flush]);
}

#[test]
fn a_flush_that_fails_is_no_success() {
    let (memory, mut worker) = (memory(), Script::worker());
    worker.disk.file.flush_fails = true;
    assert_eq!(served(&mut worker, &memory, &[header(&memory, FLUSH, 0), status()]), (1, 1));
}

#[test]
fn a_transfer_goes_on_after_a_short_one_and_after_a_signal() {
    for kind in [IN, OUT] {
        let (memory, mut worker) = (memory(), Script::worker());
        memory.write_slice(&[7; 1024], GuestAddress(DATA)).unwrap();
        worker.disk.file.outcomes =
            [Outcome::Short(100), Outcome::Fails(io::ErrorKind::Interrupted), Outcome::Short(500)].into();
        let access = if kind == IN { WRITE } else { 0 };
        let chain = [
            header(&memory, kind, 3),
            descriptor(DATA, 512, access),
            descriptor(DATA + 512, 512, access),
            status(),
        ];
        let written = if kind == IN { 1025 } else { 1 };
        assert_eq!(served(&mut worker, &memory, &chain), (written, 0));
        let parts: Vec<_> = worker
            .disk
            .file
            .calls
            .iter()
            .map(|call| match call {
                Call::Read { offset, len } | Call::Write { offset, len } => (*offset - 1536, *len),
                Call::Flush => unreachable!(),
            })
            .collect();
        assert_eq!(parts, [(0, 1024), (100, 924), (100, 924), (600, 424)]);
        let mut data = [0; 1024];
        memory.read_slice(&mut data, GuestAddress(DATA)).unwrap();
        let disk = &worker.disk.file.bytes[1536..2560];
        assert_eq!(data, disk);
    }
}

#[test]
fn a_storage_that_fails_or_ends_early_is_an_io_error() {
    for outcome in [Outcome::Fails(io::ErrorKind::Other), Outcome::Short(0)] {
        let (memory, mut worker) = (memory(), Script::worker());
        worker.disk.file.outcomes.push_back(Outcome::Short(512));
        worker.disk.file.outcomes.push_back(outcome);
        let chain = [header(&memory, IN, 0), descriptor(DATA, 1024, WRITE), status()];
        assert_eq!(served(&mut worker, &memory, &chain), (1, 1));
    }
}

#[test]
fn what_the_disk_does_not_have_never_reaches_the_storage() {
    for (kind, sector, bytes) in [
        (IN, SECTORS, 512),
        (IN, SECTORS - 1, 1024),
        (OUT, SECTORS, 512),
        (OUT, 0, (SECTORS as u32 + 1) * 512),
        // The offset, and then the end, do not fit 64 bits.
        (IN, u64::MAX, 512),
        (OUT, u64::MAX / SECTOR + 1, 512),
        (OUT, u64::MAX / SECTOR, 1024),
        (IN, 0, 1),
        (IN, 0, 513),
        (OUT, 0, 511),
    ] {
        let (memory, mut worker) = (memory(), Script::worker());
        let access = if kind == IN { WRITE } else { 0 };
        let chain = [header(&memory, kind, sector), descriptor(DATA, bytes, access), status()];
        assert_eq!(served(&mut worker, &memory, &chain), (1, 1), "{kind} {sector} {bytes}");
        assert_eq!(worker.disk.file.calls, []);
    }
    // The last sector is there.
    let (memory, mut worker) = (memory(), Script::worker());
    let chain = [header(&memory, IN, SECTORS - 1), descriptor(DATA, 512, WRITE), status()];
    assert_eq!(served(&mut worker, &memory, &chain), (513, 0));
}

#[test]
fn a_request_for_nothing_succeeds_and_touches_nothing() {
    let (memory, mut worker) = (memory(), Script::worker());
    assert_eq!(served(&mut worker, &memory, &[header(&memory, IN, 0), status()]), (1, 0));
    let empty = [header(&memory, OUT, SECTORS), descriptor(DATA, 0, 0), status()];
    assert_eq!(served(&mut worker, &memory, &empty), (1, 0));
    assert_eq!(worker.disk.file.calls, []);
}

#[test]
fn a_segment_of_no_length_is_passed_over() {
    let (memory, mut worker) = (memory(), Script::worker());
    let chain = [
        header(&memory, IN, 1),
        descriptor(DATA, 0, WRITE),
        descriptor(DATA, 512, WRITE),
        descriptor(DATA, 0, WRITE),
        status(),
    ];
    assert_eq!(served(&mut worker, &memory, &chain), (513, 0));
}

#[test]
fn odd_segments_are_fine_where_they_add_up_to_sectors() {
    let (memory, mut worker) = (memory(), Script::worker());
    let chain =
        [header(&memory, IN, 1), descriptor(DATA, 511, WRITE), descriptor(DATA + 0x1000, 1, WRITE), status()];
    assert_eq!(served(&mut worker, &memory, &chain), (513, 0));
    assert_eq!(worker.disk.file.calls, [Call::Read { offset: 512, len: 512 }]);
}

/// Both ways, where one region of memory ends and the next begins.
#[test]
fn data_may_lie_in_two_regions_of_memory() {
    let regions = [(GuestAddress(0), MEMORY), (GuestAddress(MEMORY as u64), MEMORY)];
    let memory = Memory::from_ranges(&regions).unwrap();
    let both = MEMORY as u64 - 100;
    let mut worker = Script::worker();
    let chain = [header(&memory, IN, 5), descriptor(both, 512, WRITE), status()];
    assert_eq!(served(&mut worker, &memory, &chain), (513, 0));
    let mut data = [0; 512];
    memory.read_slice(&mut data, GuestAddress(both)).unwrap();
    assert_eq!(data, [5; 512]);
    let chain = [header(&memory, OUT, 9), descriptor(both, 512, 0), status()];
    assert_eq!(served(&mut worker, &memory, &chain), (1, 0));
    assert_eq!(worker.disk.file.bytes[9 * 512..10 * 512], [5; 512]);
}

/// A header is read wherever it lies, and the hole between two regions belongs to nobody.
#[test]
fn a_hole_in_memory_is_no_memory() {
    let high = MEMORY as u64 + 0x1000;
    let regions = [(GuestAddress(0), MEMORY), (GuestAddress(high), MEMORY)];
    let memory = Memory::from_ranges(&regions).unwrap();
    let mut worker = Script::worker();
    let before = MEMORY as u64 - 256;
    for data in [descriptor(before, 512, WRITE), descriptor(high - 1, 512, WRITE)] {
        assert_eq!(served(&mut worker, &memory, &[header(&memory, IN, 0), data, status()]), (1, 1));
    }
    assert_eq!(worker.disk.file.calls, []);
    let cut = [descriptor(MEMORY as u64 - 8, 16, 0), status()];
    assert!(matches!(serve(&mut worker, &memory, &cut).0, Err(Error::Guest { .. })));
}

/// Nothing is allocated for a request, whatever came of the ones before.
#[test]
fn room_for_segments_is_made_once() {
    let (memory, mut worker) = (memory(), Script::worker());
    let before = worker.capacity();
    let mut chain = vec![header(&memory, IN, 0)];
    chain.extend((0..254).map(|at| descriptor(DATA + at * 512, 32, WRITE)));
    chain.push(status());
    let (outcome, _) = serve(&mut worker, &memory, &chain);
    outcome.unwrap();
    assert!(serve(&mut worker, &memory, &[status()]).0.is_err());
    assert_eq!(worker.capacity(), before);
}

#[test]
fn a_transfer_cut_short_goes_on_where_it_stopped() {
    let mut first = [1_u8; 4];
    let mut second = [2_u8; 4];
    let mut vectors = [&mut first, &mut second]
        .map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() });
    let rest = advance(&mut vectors, 6);
    assert_eq!(rest.len(), 1);
    assert_eq!((rest[0].iov_len, rest[0].iov_base), (2, second.as_mut_ptr().wrapping_add(2).cast()));
    assert!(advance(rest, 2).is_empty());
}
