//! Rings that lie, for both ways; and what the device refuses and says before there is a driver.

use super::*;
use crate::devices::virtio::net::device;
use bivouac_protocol::monitor::Network;

type Lie = fn(&Memory, &MockSplitQueue<Memory>);

#[test]
fn a_ring_that_lies_ends_the_machine_either_way() {
    let index = |memory: &Memory, mock: &MockSplitQueue<Memory>, value: u16| {
        memory.write_obj(value, GuestAddress(mock.avail_addr().0 + 2)).unwrap();
    };
    let ahead: Lie = |memory, mock| memory.write_obj(600_u16, GuestAddress(mock.avail_addr().0 + 2)).unwrap();
    let beyond: Lie = |memory, mock| {
        memory.write_obj(999_u16, GuestAddress(mock.avail_addr().0 + 4)).unwrap();
    };
    let circle: Lie = |_, mock| {
        let own = RawDescriptor::from(Descriptor::new(BUFFERS, 0x1000, NEXT | WRITE, 0));
        mock.desc_table().store(0, own).unwrap();
    };
    let short_circle: Lie = |_, mock| {
        let own = RawDescriptor::from(Descriptor::new(BUFFERS, 1, NEXT, 0));
        mock.desc_table().store(0, own).unwrap();
    };
    let leaves_the_table: Lie = |_, mock| {
        let one = RawDescriptor::from(Descriptor::new(BUFFERS, 0x1000, NEXT | WRITE, SIZE));
        mock.desc_table().store(0, one).unwrap();
    };
    for (what, lie, offered) in [
        ("index ahead of the ring", ahead, None),
        ("entry beyond the table", beyond, Some(1)),
        ("writable chain in a circle", circle, Some(1)),
        ("readable chain in a circle", short_circle, Some(1)),
        ("chain that leaves its table", leaves_the_table, Some(1)),
    ] {
        for way in [RECEIVE, TRANSMIT] {
            let memory = memory();
            let mut bench = Bench::new(&memory, 0);
            bench.worker.frames.incoming.push_back(frame(60));
            lie(&memory, &bench.mock);
            if let Some(value) = offered {
                index(&memory, &bench.mock, value);
            }
            let outcome = if way == RECEIVE { bench.receive() } else { bench.transmit() };
            assert!(guest_broke(&outcome), "{what}: {outcome:?}");
            assert!(bench.worker.frames.sent.is_empty() && bench.worker.frames.asked.is_empty(), "{what}");
        }
    }
}

/// An indirect table can be longer than any ring.
#[test]
fn a_chain_longer_than_a_ring_ends_the_machine() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    let segments = 257_u16;
    for at in 0..segments {
        let flags = if at + 1 < segments { NEXT } else { 0 };
        let one = RawDescriptor::from(Descriptor::new(BUFFERS, 12, flags, at + 1));
        memory.write_obj(one, GuestAddress(TABLE + 16 * u64::from(at))).unwrap();
    }
    bench.offer(&[descriptor(TABLE, 16 * u32::from(segments), INDIRECT)]);
    assert!(guest_broke(&bench.transmit()));
    let shorter = RawDescriptor::from(Descriptor::new(BUFFERS, 12, 0, 0));
    memory.write_obj(shorter, GuestAddress(TABLE + 16 * 255)).unwrap();
    let mut bench = Bench::new(&memory, 0);
    bench.offer(&[descriptor(TABLE, 16 * u32::from(segments), INDIRECT)]);
    bench.transmit().unwrap();
    assert_eq!(bench.worker.frames.sent[0].len(), 256 * 12);
}

/// With event indexes the driver is interrupted when it asked to be, and asked to notify only when the ring is empty.
#[test]
fn event_indexes_are_kept_to() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    bench.queue.set_event_idx(true);
    let used_event = GuestAddress(bench.mock.avail_addr().0 + 4 + 2 * u64::from(SIZE));
    let avail_event = GuestAddress(USED + 4 + 8 * u64::from(SIZE));
    memory.write_obj(1_u16, used_event).unwrap();
    for expected in [false, true] {
        bench.offer(&[descriptor(BUFFERS, 72, 0)]);
        assert_eq!(bench.transmit().unwrap().interrupt, expected);
    }
    assert_eq!(memory.read_obj::<u16>(avail_event).unwrap(), 2);
    bench.offer(&[descriptor(BUFFERS, 72, 0)]);
    bench.worker.frames.answers.push_back(Err(io::ErrorKind::WouldBlock.into()));
    bench.transmit().unwrap();
    assert_eq!(memory.read_obj::<u16>(avail_event).unwrap(), 2);
}

#[test]
fn the_configuration_space_has_address_and_mtu_where_the_specification_puts_them() {
    let network = Network { mac: [2, 3, 4, 5, 6, 7], mtu: 1400 };
    assert_eq!(device::config(&network), [2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0x78, 0x05]);
    device::check(&network).unwrap();
}

#[test]
fn an_address_no_card_has_or_an_mtu_no_tap_takes_is_refused() {
    let good = [2, 0, 0, 0, 0, 1];
    for (mac, mtu) in
        [([0; 6], 1500), ([1, 0, 0, 0, 0, 1], 1500), ([0xff; 6], 1500), (good, 1279), (good, 65_522)]
    {
        let outcome = device::check(&Network { mac, mtu });
        assert!(matches!(outcome, Err(Error::Config(_))), "{mac:?} {mtu}");
    }
}
