//! From the guest to the outside.

use super::*;

/// A frame of `len` bytes at [`BUFFERS`], whose header starts with `flags` and `gso_type`.
fn put(memory: &Memory, len: usize, flags: u8, gso_type: u8) -> RawDescriptor {
    let mut bytes = frame(len);
    bytes[..HEADER_LEN].fill(0);
    (bytes[0], bytes[1]) = (flags, gso_type);
    memory.write_slice(&bytes, GuestAddress(BUFFERS)).unwrap();
    descriptor(BUFFERS, u32::try_from(bytes.len()).unwrap(), 0)
}

#[test]
fn a_frame_is_sent_with_its_header_and_its_buffer_given_back() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    let one = put(&memory, 60, 0, 0);
    bench.offer(&[one]);
    let pass = bench.transmit().unwrap();
    assert_eq!(pass, Pass { interrupt: true, pause: Pause::RingEmpty });
    assert_eq!(bench.used(), [0]);
    assert_eq!(bench.worker.frames.sent[0][12..], frame(60)[12..]);
    assert_eq!(bench.worker.frames.sent[0][..12], [0; 12]);
}

#[test]
fn a_frame_is_gathered_from_segments_of_any_shape() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    let bytes: Vec<u8> = (0..100).map(|at| if at < HEADER_LEN { 0 } else { at as u8 }).collect();
    let both = SECOND_REGION - 30;
    memory.write_slice(&bytes[..5], GuestAddress(BUFFERS)).unwrap();
    memory.write_slice(&bytes[5..20], GuestAddress(BUFFERS + 0x100)).unwrap();
    memory.write_slice(&bytes[20..], GuestAddress(both)).unwrap();
    bench.offer(&[
        descriptor(BUFFERS, 5, 0),
        descriptor(BUFFERS, 0, 0),
        descriptor(BUFFERS + 0x100, 15, 0),
        descriptor(both, 80, 0),
    ]);
    bench.transmit().unwrap();
    assert_eq!(bench.worker.frames.sent, [bytes]);
}

#[test]
fn a_frame_behind_an_indirect_descriptor_is_sent() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    put(&memory, 60, 0, 0);
    for (at, (address, len, flags)) in [(BUFFERS, 12, NEXT), (BUFFERS + 12, 60, 0)].into_iter().enumerate() {
        let one = RawDescriptor::from(Descriptor::new(address, len, flags, 1));
        memory.write_obj(one, GuestAddress(TABLE + 16 * at as u64)).unwrap();
    }
    bench.offer(&[descriptor(TABLE, 32, INDIRECT)]);
    bench.transmit().unwrap();
    assert_eq!(bench.worker.frames.sent[0].len(), 72);
}

#[test]
fn offloads_are_asked_for_only_where_they_were_negotiated() {
    let all = feature::CSUM | feature::HOST_TSO4 | feature::HOST_TSO6;
    for (features, flags, gso_type, allowed) in [
        (0, 0, 0, true),
        (0, 1, 0, false),
        (feature::CSUM, 1, 0, true),
        (feature::CSUM, 2, 0, false),
        (feature::CSUM, 3, 0, false),
        (feature::CSUM, 1, 1, false),
        (all, 1, 1, true),
        (all, 1, 4, true),
        (all & !feature::HOST_TSO6, 1, 4, false),
        (all & !feature::HOST_TSO4, 1, 1, false),
        // UDP, a type nobody knows, and explicit congestion notification, which is not offered.
        (all, 1, 3, false),
        (all, 1, 5, false),
        (all, 1, 2, false),
        (all, 1, 0x81, false),
    ] {
        let memory = memory();
        let mut bench = Bench::new(&memory, features);
        let one = put(&memory, 60, flags, gso_type);
        bench.offer(&[one]);
        let outcome = bench.transmit();
        assert_eq!(outcome.is_ok(), allowed, "{flags} {gso_type}: {outcome:?}");
        assert_eq!(guest_broke(&outcome), !allowed);
        assert_eq!(bench.worker.frames.sent.len(), usize::from(allowed));
    }
}

#[test]
fn the_largest_frame_is_sent_and_one_byte_more_ends_the_machine() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    let one = put(&memory, FRAME_MAX, 0, 0);
    bench.offer(&[one]);
    bench.transmit().unwrap();
    assert_eq!(bench.worker.frames.sent[0].len(), 65_562);
    let one = put(&memory, FRAME_MAX + 1, 0, 0);
    bench.offer(&[one]);
    assert!(guest_broke(&bench.transmit()));
    assert_eq!(bench.worker.frames.sent.len(), 1);
}

#[test]
fn what_is_no_frame_ends_the_machine() {
    for chain in [
        vec![descriptor(BUFFERS, 72, WRITE)],
        vec![descriptor(BUFFERS, 72, 0), descriptor(BUFFERS, 1, WRITE)],
        vec![descriptor(BUFFERS, 11, 0)],
        vec![descriptor(BUFFERS, 0, 0)],
        vec![descriptor(MEMORY_END, 72, 0)],
        vec![descriptor(MEMORY_END - 12, 72, 0)],
        vec![descriptor(MEMORY_END - 6, 72, 0)],
        vec![descriptor(u64::MAX - 12, 72, 0)],
        vec![descriptor(BUFFERS, u32::MAX, 0), descriptor(BUFFERS, u32::MAX, 0)],
        // Indirect tables: not a whole number of entries, empty, outside memory, within an indirect table.
        vec![descriptor(TABLE, 31, INDIRECT)],
        vec![descriptor(TABLE, 0, INDIRECT)],
        vec![descriptor(MEMORY_END, 16, INDIRECT)],
        vec![descriptor(TABLE, 16, INDIRECT)],
    ] {
        let memory = memory();
        let mut bench = Bench::new(&memory, 0);
        let nested = RawDescriptor::from(Descriptor::new(TABLE, 16, INDIRECT, 0));
        memory.write_obj(nested, GuestAddress(TABLE)).unwrap();
        bench.offer(&chain);
        let outcome = bench.transmit();
        assert!(guest_broke(&outcome), "{outcome:?}");
        assert!(bench.worker.frames.sent.is_empty());
    }
}

/// More than the tap takes now waits in the driver's own ring, whole and in order.
#[test]
fn a_tap_without_room_leaves_the_frame_in_the_ring() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    let one = put(&memory, 60, 0, 0);
    bench.offer(&[one]);
    bench.offer(&[one]);
    let full = || Err(io::ErrorKind::WouldBlock.into());
    bench.worker.frames.answers = [Ok(()), full(), full()].into();
    assert_eq!(bench.transmit().unwrap(), Pass { interrupt: true, pause: Pause::NotReady });
    assert_eq!((bench.queue.next_avail(), bench.queue.next_used()), (1, 1));
    assert_eq!(bench.transmit().unwrap(), Pass { interrupt: false, pause: Pause::NotReady });
    assert_eq!(bench.transmit().unwrap(), Pass { interrupt: true, pause: Pause::RingEmpty });
    assert_eq!((bench.worker.frames.sent.len(), bench.used()), (2, vec![0, 0]));
}

#[test]
fn what_the_network_cannot_carry_is_lost_and_a_tap_that_is_gone_ends_the_machine() {
    for (errno, survives) in [
        (libc::EINVAL, true),
        (libc::EIO, true),
        (libc::ENOBUFS, true),
        (libc::ENOMEM, true),
        (libc::EBADFD, false),
        (libc::EPERM, false),
    ] {
        let memory = memory();
        let mut bench = Bench::new(&memory, 0);
        let one = put(&memory, 60, 0, 0);
        bench.offer(&[one]);
        bench.worker.frames.answers.push_back(Err(io::Error::from_raw_os_error(errno)));
        let outcome = bench.transmit();
        assert_eq!(outcome.is_ok(), survives, "{errno}: {outcome:?}");
        assert_eq!(bench.queue.next_used(), u16::from(survives));
        assert!(survives || matches!(outcome, Err(Error::Io { .. })));
    }
}

#[test]
fn a_burst_is_sent_in_passes_of_bounded_length() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    let one = put(&memory, 60, 0, 0);
    for _ in 0..BUDGET + 1 {
        bench.offer(&[one]);
    }
    assert_eq!(bench.transmit().unwrap().pause, Pause::BudgetSpent);
    assert_eq!(bench.worker.frames.sent.len(), BUDGET);
    assert_eq!(bench.transmit().unwrap().pause, Pause::RingEmpty);
}
