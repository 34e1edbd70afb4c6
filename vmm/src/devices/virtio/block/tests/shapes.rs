//! Chains of every shape a descriptor table can give them.

use super::*;
use crate::devices::virtio::{
    Device,
    block::{Block, feature},
    runner::{BUDGET, Drained, commands},
};
use std::io;

const INDIRECT: u16 = 4;
const TABLE: u64 = 0x30_0000;

/// Writes an indirect table and gives the descriptor that names it.
fn table(memory: &Memory, chain: &[RawDescriptor]) -> RawDescriptor {
    for (at, one) in chain.iter().enumerate() {
        let one = Descriptor::from(*one);
        let flags = one.flags() | if at + 1 < chain.len() { NEXT } else { 0 };
        let one = RawDescriptor::from(Descriptor::new(one.addr().0, one.len(), flags, at as u16 + 1));
        memory.write_obj(one, GuestAddress(TABLE + 16 * at as u64)).unwrap();
    }
    descriptor(TABLE, 16 * chain.len() as u32, INDIRECT)
}

fn guest_broke(outcome: &Result<u32, Error>) -> bool {
    matches!(outcome, Err(Error::Guest { device: "block", .. }))
}

#[test]
fn a_request_in_an_indirect_table_is_served_like_any_other() {
    let (memory, mut worker) = (memory(), BlockWorker::new(disk(8 * SECTOR, true)));
    let whole = table(&memory, &[header(&memory, IN, 6), descriptor(DATA, 512, WRITE), status()]);
    assert_eq!(served(&mut worker, &memory, &[whole]), (513, 0));
    assert_eq!(memory.read_obj::<u8>(GuestAddress(DATA)).unwrap(), 6);
    // The table may also follow segments of the ring's own table.
    let rest = table(&memory, &[descriptor(DATA, 512, WRITE), status()]);
    assert_eq!(served(&mut worker, &memory, &[header(&memory, IN, 7), rest]), (513, 0));
    assert_eq!(memory.read_obj::<u8>(GuestAddress(DATA)).unwrap(), 7);
}

#[test]
fn an_indirect_table_that_is_none_ends_the_machine() {
    let shapes: [fn(&Memory) -> RawDescriptor; 5] = [
        |_| descriptor(TABLE, 17, INDIRECT),
        |_| descriptor(TABLE, 0, INDIRECT),
        |_| descriptor(MEMORY as u64, 48, INDIRECT),
        |_| descriptor(TABLE, 16 * 0x1_0000, INDIRECT),
        |memory| table(memory, &[header(memory, IN, 0), descriptor(TABLE, 16, INDIRECT), status()]),
    ];
    for shape in shapes {
        let (memory, mut worker) = (memory(), BlockWorker::new(disk(SECTOR, true)));
        let chain = [shape(&memory)];
        let (outcome, _) = serve(&mut worker, &memory, &chain);
        assert!(guest_broke(&outcome), "{outcome:?}");
    }
}

#[test]
fn a_request_has_as_many_segments_as_a_ring_and_no_more() {
    for (segments, fits) in [(254, true), (255, false)] {
        let (memory, mut worker) = (memory(), BlockWorker::new(disk(SECTOR, true)));
        let mut chain = vec![header(&memory, IN, 0), descriptor(DATA, 512 - segments + 1, WRITE)];
        chain.extend((1..u64::from(segments)).map(|at| descriptor(DATA + at * 512, 1, WRITE)));
        chain.push(status());
        let whole = table(&memory, &chain);
        let (outcome, _) = serve(&mut worker, &memory, &[whole]);
        assert_eq!(outcome.is_ok(), fits, "{outcome:?}");
        assert_eq!(guest_broke(&outcome), !fits);
    }
}

/// What the iterator gives before it stops looks like a request; it is not one.
#[test]
fn a_chain_that_starts_well_and_never_ends_ends_the_machine() {
    let (memory, mut worker) = (memory(), BlockWorker::new(disk(8 * SECTOR, true)));
    for (what, next) in [("in a circle", 2), ("to its start", 0), ("out of the table", 256)] {
        let mock = MockSplitQueue::create(&memory, GuestAddress(0), 256);
        let chain = [header(&memory, IN, 0), descriptor(DATA, 512, WRITE), descriptor(STATUS, 1, WRITE)];
        for ((at, one), next) in chain.into_iter().enumerate().zip([1, 2, next]) {
            let one = Descriptor::from(one);
            let one = Descriptor::new(one.addr().0, one.len(), one.flags() | NEXT, next);
            mock.desc_table().store(at as u16, RawDescriptor::from(one)).unwrap();
        }
        memory.write_obj(0_u16, GuestAddress(mock.avail_addr().0 + 4)).unwrap();
        memory.write_obj(1_u16, GuestAddress(mock.avail_addr().0 + 2)).unwrap();
        let mut queue: Queue = mock.create_queue().unwrap();
        let outcome = runner::drain(&mut worker, &mut queue, &memory);
        assert!(matches!(outcome, Err(Error::Guest { .. })), "{what}: {outcome:?}");
        assert_eq!(memory.read_obj::<u8>(GuestAddress(STATUS)).unwrap(), UNTOUCHED, "{what}");
    }
}

#[test]
fn more_than_four_gib_in_one_chain_end_the_machine() {
    let (memory, mut worker) = (memory(), BlockWorker::new(disk(SECTOR, true)));
    let huge = descriptor(DATA, u32::MAX, WRITE);
    let (outcome, _) = serve(&mut worker, &memory, &[header(&memory, IN, 0), huge, huge, status()]);
    assert!(guest_broke(&outcome), "{outcome:?}");
}

/// SCSI commands, discard, write zeroes, and numbers that nobody uses: none is offered.
#[test]
fn a_type_of_request_that_is_not_offered_is_unsupported() {
    for kind in [2, 3, 5, 9, 11, 13, 14, 0x8000_0000, u32::MAX] {
        for read_only in [true, false] {
            let (memory, mut worker) = (memory(), BlockWorker::new(disk(SECTOR, read_only)));
            assert_eq!(served(&mut worker, &memory, &[header(&memory, kind, 0), status()]), (1, 2));
            let with_data = [header(&memory, kind, 0), descriptor(DATA, 512, WRITE), status()];
            assert_eq!(served(&mut worker, &memory, &with_data), (1, 2));
        }
    }
}

#[test]
fn the_name_is_cut_to_the_drivers_buffer_and_never_longer_than_the_specification_has_it() {
    for (len, written) in [(0, 1), (1, 2), (5, 6), (20, 21), (21, 21), (512, 21)] {
        let (memory, mut worker) = (memory(), BlockWorker::new(disk(SECTOR, false)));
        memory.write_slice(&[UNTOUCHED; 32], GuestAddress(DATA)).unwrap();
        let chain = [header(&memory, GET_ID, 77), descriptor(DATA, len, WRITE), status()];
        assert_eq!(served(&mut worker, &memory, &chain), (written, 0), "{len}");
        let end = GuestAddress(DATA + u64::from(written) - 1);
        assert_eq!(memory.read_obj::<u8>(end).unwrap(), UNTOUCHED);
    }
}

#[test]
fn the_name_needs_one_buffer_in_memory() {
    for data in [
        vec![],
        vec![descriptor(DATA, 10, WRITE), descriptor(DATA + 10, 10, WRITE)],
        vec![descriptor(MEMORY as u64 - 10, 20, WRITE)],
    ] {
        let (memory, mut worker) = (memory(), BlockWorker::new(disk(SECTOR, true)));
        let chain = [vec![header(&memory, GET_ID, 0)], data, vec![status()]].concat();
        assert_eq!(served(&mut worker, &memory, &chain), (1, 1));
    }
}

#[test]
fn a_ring_full_of_requests_is_served_in_order_with_one_interrupt() {
    let (memory, mut worker) = (memory(), BlockWorker::new(disk(8 * SECTOR, true)));
    let mock = MockSplitQueue::create(&memory, GuestAddress(0), 256);
    for sector in 0..8_u16 {
        let at = u64::from(sector) * 0x100;
        memory.write_obj(IN, GuestAddress(HEADER + at)).unwrap();
        memory.write_obj(u64::from(sector), GuestAddress(HEADER + at + 8)).unwrap();
        let data = DATA + u64::from(sector) * 512;
        let first = sector * 3;
        let chain = [
            Descriptor::new(HEADER + at, 16, NEXT, first + 1),
            Descriptor::new(data, 512, NEXT | WRITE, first + 2),
            Descriptor::new(STATUS + u64::from(sector), 1, WRITE, 0),
        ];
        mock.add_desc_chains(&chain.map(RawDescriptor::from), first).unwrap();
    }
    let mut queue: Queue = mock.create_queue().unwrap();
    let drained = runner::drain(&mut worker, &mut queue, &memory).unwrap();
    assert_eq!(drained, Drained { interrupt: true, more: false });
    let drained = runner::drain(&mut worker, &mut queue, &memory).unwrap();
    assert_eq!(drained, Drained { interrupt: false, more: false });
    for sector in 0..8_u16 {
        let used = mock.used().ring().ref_at(sector.into()).unwrap().load();
        assert_eq!((used.id(), used.len()), (u32::from(sector) * 3, 513));
        let byte: u8 = memory.read_obj(GuestAddress(DATA + u64::from(sector) * 512)).unwrap();
        assert_eq!(u16::from(byte), sector);
    }
}

/// A storage through which the driver adds a request whenever one is served, as a second processor of the guest would.
struct Feeding {
    memory: Memory,
    avail: u64,
}

impl Storage for Feeding {
    fn read(&mut self, _: &[libc::iovec], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn write(&mut self, _: &[libc::iovec], _: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        let index: u16 = self.memory.read_obj(GuestAddress(self.avail + 2)).unwrap();
        self.memory.write_obj(index.wrapping_add(1), GuestAddress(self.avail + 2)).unwrap();
        Ok(())
    }
}

#[test]
fn a_guest_that_never_stops_asking_is_served_in_turns() {
    let memory = memory();
    let mock = MockSplitQueue::create(&memory, GuestAddress(0), 256);
    let chain = [Descriptor::from(header(&memory, FLUSH, 0)), Descriptor::from(status())];
    let linked = [
        Descriptor::new(chain[0].addr().0, chain[0].len(), NEXT, 1),
        Descriptor::new(chain[1].addr().0, chain[1].len(), WRITE, 0),
    ];
    mock.add_desc_chains(&linked.map(RawDescriptor::from), 0).unwrap();
    let file = Feeding { memory: memory.clone(), avail: mock.avail_addr().0 };
    let mut worker = BlockWorker::new(Disk { file, bytes: SECTOR, read_only: false, name: "scratch" });
    let mut queue: Queue = mock.create_queue().unwrap();
    // The mock's own used ring lies over the second half of its available ring.
    queue.set_used_ring_address(Some(0x4000), Some(0));
    for turn in 1..=3_u16 {
        let drained = runner::drain(&mut worker, &mut queue, &memory).unwrap();
        assert_eq!(drained, Drained { interrupt: true, more: true });
        assert_eq!(queue.next_used(), turn * BUDGET as u16);
    }
}

#[test]
fn the_device_says_what_the_disk_is() {
    for (read_only, own) in [(true, feature::RO), (false, feature::FLUSH)] {
        let (handle, _commands) = commands().unwrap();
        let device = Block::new(handle, 8 * SECTOR, read_only);
        let ring = crate::devices::virtio::feature::RING;
        assert_eq!((device.id(), device.features()), (2, ring | feature::SEG_MAX | own));
        // capacity, size_max (not offered), seg_max
        let expected = [[8, 0, 0, 0, 0, 0, 0, 0].as_slice(), &[0; 4], &[254, 0, 0, 0]].concat();
        assert_eq!(device.config()[..16], expected);
        assert_eq!(device.queue_sizes(), [256]);
    }
}
