//! From the outside to the guest.

use super::*;

fn buffer(address: u64) -> RawDescriptor {
    descriptor(address, ROOM, WRITE)
}

#[test]
fn a_frame_lands_in_the_drivers_buffer_behind_its_header() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    bench.offer(&[buffer(BUFFERS)]);
    bench.worker.frames.incoming.push_back(frame(60));
    let pass = bench.receive().unwrap();
    assert_eq!(pass, Pass { interrupt: true, pause: Pause::RingEmpty });
    assert_eq!(bench.used(), [72]);
    // One buffer: the last two bytes of the header say so.
    assert_eq!(bench.bytes(BUFFERS, 12), [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]);
    assert_eq!(bench.bytes(BUFFERS + 12, 60), frame(60)[12..]);
}

/// Header and data in any number of segments, one of which lies in both regions of memory.
#[test]
fn a_frame_is_spread_over_whatever_segments_the_driver_has() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    let both = SECOND_REGION - 20;
    bench.offer(&[
        descriptor(BUFFERS, 7, WRITE),
        descriptor(BUFFERS + 0x100, 0, WRITE),
        descriptor(BUFFERS + 0x200, 9, WRITE),
        descriptor(both, ROOM, WRITE),
    ]);
    bench.worker.frames.incoming.push_back(frame(100));
    bench.receive().unwrap();
    assert_eq!(bench.used(), [112]);
    let mut whole = bench.bytes(BUFFERS, 7);
    whole.extend(bench.bytes(BUFFERS + 0x200, 9));
    whole.extend(bench.bytes(both, 96));
    assert_eq!(whole[12..], frame(100)[12..]);
    assert_eq!(whole[10..12], [1, 0]);
}

#[test]
fn nothing_is_read_before_there_is_a_buffer_for_it() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    bench.worker.frames.incoming.push_back(frame(60));
    let pass = bench.receive().unwrap();
    assert_eq!(pass, Pass { interrupt: false, pause: Pause::RingEmpty });
    assert!(bench.worker.frames.asked.is_empty());
    assert_eq!(bench.worker.frames.incoming.len(), 1);
}

#[test]
fn a_buffer_for_which_there_is_no_frame_stays_in_the_ring() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    bench.offer(&[buffer(BUFFERS)]);
    assert_eq!(bench.receive().unwrap(), Pass { interrupt: false, pause: Pause::NotReady });
    assert_eq!((bench.queue.next_avail(), bench.queue.next_used()), (0, 0));
    bench.worker.frames.incoming.push_back(frame(60));
    bench.receive().unwrap();
    assert_eq!(bench.used(), [72]);
}

/// What the tap is asked for has room for every frame the driver takes, and one byte more.
#[test]
fn the_room_is_that_of_the_largest_frame_negotiated() {
    let large = FRAME_MAX + HEADER_LEN;
    for (features, mtu, len, room) in [
        (0, 1500, 0x4000, ROOM as usize),
        (0, 9000, 0x4000, ROOM as usize),
        (feature::GUEST_CSUM, 1500, 0x4000, ROOM as usize),
        (feature::MTU, 1280, 0x4000, ROOM as usize),
        (feature::MTU, 9000, 0x4000, 9030),
        (feature::MTU, 65_521, 0x2_0000, 65_551),
        (feature::GUEST_TSO4, 1500, 0x2_0000, large),
        (feature::GUEST_TSO6, 1500, 0x2_0000, large),
    ] {
        let memory = memory();
        let mut bench = Bench::new(&memory, features);
        bench.worker = NetWorker::new(Script::default(), mtu);
        bench.worker.negotiated(features);
        bench.offer(&[descriptor(BUFFERS, len, WRITE)]);
        bench.receive().unwrap();
        assert_eq!(bench.worker.frames.asked, [room + 1]);
    }
}

/// Cut short it would be a different frame.
#[test]
fn a_frame_larger_than_the_driver_takes_is_lost_whole_and_the_next_one_arrives() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    bench.offer(&[descriptor(BUFFERS, 0x4000, WRITE)]);
    let room = ROOM as usize - HEADER_LEN;
    for len in [room + 1, room + 2, 9000, room] {
        bench.worker.frames.incoming.push_back(frame(len));
    }
    bench.receive().unwrap();
    assert_eq!(bench.used(), [ROOM]);
    assert_eq!(bench.bytes(BUFFERS + 12, room), frame(room)[12..]);
    // Nor does the outside hold a pass up with nothing but such.
    bench.offer(&[descriptor(BUFFERS, ROOM, WRITE)]);
    for _ in 0..=BUDGET {
        bench.worker.frames.incoming.push_back(frame(9000));
    }
    let pass = bench.receive().unwrap();
    assert_eq!(pass, Pass { interrupt: false, pause: Pause::BudgetSpent });
    assert_eq!((bench.worker.frames.incoming.len(), bench.queue.next_avail()), (1, 1));
}

#[test]
fn the_largest_frame_arrives_whole() {
    let memory = memory();
    let mut bench = Bench::new(&memory, feature::GUEST_CSUM | feature::GUEST_TSO4);
    let half = 0x8000_u32;
    bench.offer(&[descriptor(BUFFERS, half, WRITE), descriptor(BUFFERS + 0x1_0000, half + 26, WRITE)]);
    bench.worker.frames.incoming.push_back(frame(FRAME_MAX));
    bench.receive().unwrap();
    assert_eq!(bench.used(), [65_562]);
    assert_eq!(bench.bytes(BUFFERS + 0x1_0000 + 0x8000 + 25, 1), frame(FRAME_MAX)[65_561..]);
}

#[test]
fn a_buffer_that_no_frame_fits_or_that_is_none_ends_the_machine() {
    for chain in [
        vec![descriptor(BUFFERS, ROOM - 1, WRITE)],
        vec![descriptor(BUFFERS, ROOM, 0)],
        vec![descriptor(BUFFERS, ROOM, WRITE), descriptor(BUFFERS, 1, 0)],
        vec![descriptor(MEMORY_END - 100, ROOM, WRITE)],
        vec![descriptor(u64::MAX - 100, ROOM, WRITE)],
        vec![descriptor(u64::MAX - 4, 12, WRITE), descriptor(BUFFERS, ROOM, WRITE)],
        vec![descriptor(BUFFERS, 0, WRITE)],
    ] {
        let memory = memory();
        let mut bench = Bench::new(&memory, 0);
        bench.worker.frames.incoming.push_back(frame(60));
        bench.offer(&chain);
        let outcome = bench.receive();
        assert!(guest_broke(&outcome), "{outcome:?}");
        assert_eq!(bench.queue.next_used(), 0);
    }
}

#[test]
fn a_buffer_too_small_for_large_frames_ends_the_machine_where_they_were_negotiated() {
    let memory = memory();
    let mut bench = Bench::new(&memory, feature::GUEST_CSUM | feature::GUEST_TSO6);
    bench.offer(&[descriptor(BUFFERS, 65_561, WRITE)]);
    assert!(guest_broke(&bench.receive()));
    assert!(bench.worker.frames.asked.is_empty());
}

#[test]
fn a_burst_is_taken_in_passes_of_bounded_length() {
    let memory = memory();
    let mut bench = Bench::new(&memory, 0);
    for _ in 0..BUDGET + 5 {
        bench.offer(&[buffer(BUFFERS)]);
        bench.worker.frames.incoming.push_back(frame(60));
    }
    let pass = bench.receive().unwrap();
    assert_eq!(pass, Pass { interrupt: true, pause: Pause::BudgetSpent });
    assert_eq!(bench.used().len(), BUDGET);
    let pass = bench.receive().unwrap();
    assert_eq!(pass, Pass { interrupt: true, pause: Pause::RingEmpty });
    assert_eq!(bench.used().len(), BUDGET + 5);
}

/// What the tap does wrong is the host's fault, not the guest's.
#[test]
fn a_tap_that_fails_ends_the_machine_as_such() {
    for (failure, claim) in [
        (Some(io::Error::from_raw_os_error(libc::EBADFD)), None),
        (None, Some(0)),
        (None, Some(HEADER_LEN - 1)),
        (None, Some(ROOM as usize + 2)),
    ] {
        let memory = memory();
        let mut bench = Bench::new(&memory, 0);
        bench.offer(&[buffer(BUFFERS)]);
        bench.worker.frames.incoming.push_back(frame(60));
        (bench.worker.frames.failure, bench.worker.frames.claim) = (failure, claim);
        let outcome = bench.receive();
        assert!(matches!(outcome, Err(Error::Io { .. } | Error::Device { .. })), "{outcome:?}");
    }
}
