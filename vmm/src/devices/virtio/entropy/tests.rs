//! Every request, and every way to get one wrong, on mock rings.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::{Entropy, EntropyWorker, QUEUE_SIZE, REQUEST_MAX};
use crate::{
    Error,
    devices::virtio::{
        Device, feature,
        runner::{self, Worker},
    },
    memory::Memory,
};
use virtio_queue::{
    Queue,
    desc::{RawDescriptor, split::Descriptor},
    mock::MockSplitQueue,
};
use vm_memory::{Bytes, GuestAddress};

const SECOND_REGION: u64 = 0x2_0000;
const MEMORY_END: u64 = 0x4_0000;
const BUFFER: u64 = 0x1_0000;
const TABLE: u64 = 0x8000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn memory() -> Memory {
    Memory::from_ranges(&[(GuestAddress(0), 0x2_0000), (GuestAddress(SECOND_REGION), 0x2_0000)]).unwrap()
}

fn descriptor(address: u64, len: u32, flags: u16) -> RawDescriptor {
    RawDescriptor::from(Descriptor::new(address, len, flags, 0))
}

fn serve(memory: &Memory, chain: &[RawDescriptor]) -> Result<u32, Error> {
    let queue = MockSplitQueue::create(memory, GuestAddress(0), QUEUE_SIZE);
    EntropyWorker.serve(memory, queue.build_desc_chain(chain).unwrap())
}

/// How many of the bytes there are not zero. Of 256 random ones, fewer than 200 are never.
fn filled(memory: &Memory, address: u64, len: usize) -> usize {
    let mut bytes = vec![0; len];
    memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    bytes.iter().filter(|byte| **byte != 0).count()
}

#[test]
fn a_buffer_is_filled_and_what_lies_behind_it_is_not() {
    let memory = memory();
    assert_eq!(serve(&memory, &[descriptor(BUFFER, 256, WRITE)]).unwrap(), 256);
    assert!(filled(&memory, BUFFER, 256) > 200);
    assert_eq!(filled(&memory, BUFFER + 256, 256), 0);
}

#[test]
fn two_requests_get_different_bytes() {
    let memory = memory();
    serve(&memory, &[descriptor(BUFFER, 32, WRITE)]).unwrap();
    let first: [u8; 32] = memory.read_obj(GuestAddress(BUFFER)).unwrap();
    serve(&memory, &[descriptor(BUFFER, 32, WRITE)]).unwrap();
    assert_ne!(first, memory.read_obj::<[u8; 32]>(GuestAddress(BUFFER)).unwrap());
}

#[test]
fn a_request_gets_no_more_than_the_limit_however_much_it_asks_for() {
    for (len, given) in [(0, 0), (1, 1), (255, 255), (256, 256), (257, 256), (u32::MAX, 256)] {
        let memory = memory();
        assert_eq!(serve(&memory, &[descriptor(BUFFER, len, WRITE)]).unwrap(), given);
        assert_eq!(filled(&memory, BUFFER + REQUEST_MAX as u64, 0x1000), 0);
    }
}

#[test]
fn only_the_first_segment_is_filled() {
    let memory = memory();
    let chain = [descriptor(BUFFER, 16, WRITE), descriptor(BUFFER + 0x100, 16, WRITE)];
    assert_eq!(serve(&memory, &chain).unwrap(), 16);
    assert_eq!(filled(&memory, BUFFER + 0x100, 16), 0);
}

#[test]
fn a_buffer_may_lie_in_two_regions_and_behind_an_indirect_descriptor() {
    let memory = memory();
    let both = SECOND_REGION - 100;
    let one = RawDescriptor::from(Descriptor::new(both, 200, WRITE, 0));
    memory.write_obj(one, GuestAddress(TABLE)).unwrap();
    assert_eq!(serve(&memory, &[descriptor(TABLE, 16, INDIRECT)]).unwrap(), 200);
    assert!(filled(&memory, both, 200) > 150);
}

#[test]
fn what_cannot_be_filled_ends_the_machine() {
    for chain in [
        vec![descriptor(BUFFER, 16, 0)],
        vec![descriptor(BUFFER, 16, 0), descriptor(BUFFER, 16, WRITE)],
        vec![descriptor(MEMORY_END, 16, WRITE)],
        vec![descriptor(MEMORY_END - 8, 16, WRITE)],
        vec![descriptor(u64::MAX, 16, WRITE)],
        vec![descriptor(TABLE, 15, INDIRECT)],
        vec![descriptor(TABLE, 0, INDIRECT)],
        vec![descriptor(MEMORY_END, 16, INDIRECT)],
    ] {
        let outcome = serve(&memory(), &chain);
        assert!(matches!(outcome, Err(Error::Guest { device: "entropy", .. })), "{outcome:?}");
    }
}

/// An index ahead of the ring, an entry beyond the table: the end. A chain in a circle costs no more than its first segment.
#[test]
fn a_ring_that_lies_is_not_followed_for_ever() {
    for (index, entry, lives) in [(17_u16, 0_u16, false), (1, QUEUE_SIZE, false), (1, 0, true)] {
        let memory = memory();
        let mock = MockSplitQueue::create(&memory, GuestAddress(0), QUEUE_SIZE);
        let circle = RawDescriptor::from(Descriptor::new(BUFFER, 16, NEXT | WRITE, 0));
        mock.desc_table().store(0, circle).unwrap();
        memory.write_obj(entry, GuestAddress(mock.avail_addr().0 + 4)).unwrap();
        memory.write_obj(index, GuestAddress(mock.avail_addr().0 + 2)).unwrap();
        let mut queue: Queue = mock.create_queue().unwrap();
        let outcome = runner::drain(&mut EntropyWorker, &mut queue, &memory);
        assert_eq!(outcome.is_ok(), lives, "{outcome:?}");
        assert!(lives || matches!(outcome, Err(Error::Guest { .. })));
    }
}

#[test]
fn the_device_offers_one_queue_and_nothing_of_its_own() {
    let (handle, _commands) = runner::commands().unwrap();
    let device = Entropy::new(handle);
    assert_eq!((device.id(), device.features()), (4, feature::RING));
    assert_eq!((device.queue_sizes(), device.config()), (&[16][..], &[][..]));
}
