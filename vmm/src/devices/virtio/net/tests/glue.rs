//! The runner on an event loop, with a socket in the tap's place: kicks, edges, interrupts, and the way the queues take.

use super::*;
use crate::{
    devices::virtio::{
        Activation, Interrupt,
        net::{runner, tap::Tap},
        runner::Handle,
    },
    ending::{Endings, channel_of_endings},
};
use event_manager::{EventManager, SubscriberOps};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use std::{os::fd::OwnedFd, sync::Arc, thread, time::Duration};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const RINGS: [u64; 2] = [0, 0x8000];

struct Host<'a> {
    memory: &'a Memory,
    rings: [MockSplitQueue<'a, Memory>; 2],
    events: EventManager<runner::NetRunner<Tap>>,
    handle: Handle,
    kicks: Vec<EventFd>,
    line: EventFd,
    endings: Endings,
    outside: OwnedFd,
}

impl<'a> Host<'a> {
    fn new(memory: &'a Memory) -> Self {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (inside, outside) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        // A few frames fill it.
        sockopt::set_socket_send_buffer_size(&inside, 4096).unwrap();
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let (kicks, line) = (vec![event(), event()], event());
        let (ending, endings) = channel_of_endings().unwrap();
        let copies = kicks.iter().map(|kick| kick.try_clone().unwrap()).collect();
        let worker = NetWorker::new(Tap::of_socket(inside), MTU);
        let (handle, runner) = runner::pair(worker, copies, ending).unwrap();
        let mut events = EventManager::new().unwrap();
        events.add_subscriber(runner);
        let rings = RINGS.map(|start| MockSplitQueue::create(memory, GuestAddress(start), SIZE));
        Self { memory, rings, events, handle, kicks, line, endings, outside }
    }

    fn activate(&mut self) {
        let queues = self.rings.iter().map(queue_of).collect();
        let interrupt = Arc::new(Interrupt::new(self.line.try_clone().unwrap()));
        let memory = self.memory.clone();
        self.handle.activate(Activation { features: 0, queues, interrupt, memory }).unwrap();
        self.run();
    }

    /// Lets the event loop work until it has nothing to do.
    fn run(&mut self) {
        while self.events.run_with_timeout(0).unwrap() > 0 {}
    }

    fn offer(&self, ring: usize, count: u16, flags: u16, len: u32) {
        let index = self.avail(ring);
        for at in index..index + count {
            self.rings[ring].add_desc_chains(&[descriptor(BUFFERS, len, flags)], at).unwrap();
        }
    }

    fn avail(&self, ring: usize) -> u16 {
        self.memory.read_obj(GuestAddress(self.rings[ring].avail_addr().0 + 2)).unwrap()
    }

    fn used(&self, ring: usize) -> u16 {
        self.memory.read_obj(GuestAddress(RINGS[ring] + USED + 2)).unwrap()
    }

    fn interrupts(&self) -> u64 {
        self.line.read().unwrap_or(0)
    }

    fn give(&self, count: usize) {
        for _ in 0..count {
            rustix::io::write(&self.outside, &frame(60)).unwrap();
        }
    }

    /// Takes every frame that has come out.
    fn take(&self) -> usize {
        let mut bytes = [0; 4096];
        (0..).take_while(|_| rustix::io::read(&self.outside, &mut bytes).is_ok()).count()
    }
}

#[test]
fn frames_that_come_before_the_driver_wait_for_it_and_arrive() {
    let memory = memory();
    let mut host = Host::new(&memory);
    host.give(2);
    host.run();
    host.offer(RECEIVE, 2, WRITE, ROOM);
    host.activate();
    assert_eq!((host.used(RECEIVE), host.interrupts()), (2, 1));
    assert!(host.endings.heard().is_none());
}

#[test]
fn frames_wait_for_buffers_and_come_with_the_kick_that_announces_them() {
    let memory = memory();
    let mut host = Host::new(&memory);
    host.activate();
    host.give(3);
    host.run();
    assert_eq!((host.used(RECEIVE), host.interrupts()), (0, 0));
    host.offer(RECEIVE, 2, WRITE, ROOM);
    host.kicks[RECEIVE].write(1).unwrap();
    host.run();
    assert_eq!((host.used(RECEIVE), host.interrupts()), (2, 1));
    host.offer(RECEIVE, 4, WRITE, ROOM);
    host.kicks[RECEIVE].write(1).unwrap();
    host.run();
    host.give(1);
    host.run();
    assert_eq!((host.used(RECEIVE), host.interrupts()), (4, 2));
}

#[test]
fn more_frames_than_a_pass_moves_all_arrive_after_one_edge() {
    let memory = memory();
    let mut host = Host::new(&memory);
    host.offer(RECEIVE, 200, WRITE, ROOM);
    host.activate();
    host.give(150);
    host.run();
    assert_eq!(host.used(RECEIVE), 150);
    assert_eq!(host.interrupts(), 3);
}

/// A frame the other side has no room for waits, however often the guest kicks; then all of them go, in one edge.
#[test]
fn sending_stops_while_the_other_side_is_full_and_goes_on_when_it_has_room() {
    let memory = memory();
    let mut host = Host::new(&memory);
    host.activate();
    memory.write_slice(&[0; 12], GuestAddress(BUFFERS)).unwrap();
    host.offer(TRANSMIT, 100, 0, 1000);
    host.kicks[TRANSMIT].write(1).unwrap();
    host.run();
    let before = host.used(TRANSMIT);
    assert!((1..100).contains(&before), "{before}");
    for _ in 0..3 {
        host.kicks[TRANSMIT].write(1).unwrap();
        host.run();
    }
    assert_eq!(host.used(TRANSMIT), before);
    let mut taken = 0;
    while host.used(TRANSMIT) < 100 {
        let now = host.take();
        assert!(now > 0, "stuck at {taken} frames");
        taken += now;
        host.run();
    }
    assert_eq!(taken + host.take(), 100);
    assert!(host.endings.heard().is_none());
}

/// Nothing is in flight once the queues are back, and they can be taken up where they were left.
#[test]
fn sleep_gives_the_queues_back_and_stops_all_traffic() {
    let memory = memory();
    let mut host = Host::new(&memory);
    host.offer(RECEIVE, 4, WRITE, ROOM);
    host.activate();
    host.give(1);
    host.run();
    let queues = thread::scope(|scope| {
        let handle = &host.handle;
        let sleeper = scope.spawn(move || handle.sleep().unwrap());
        while !sleeper.is_finished() {
            host.events.run_with_timeout(1).unwrap();
        }
        sleeper.join().unwrap()
    });
    assert_eq!(queues.iter().map(QueueT::next_avail).collect::<Vec<_>>(), [1, 0]);
    host.give(2);
    host.run();
    assert_eq!(host.used(RECEIVE), 1);
    let interrupt = Arc::new(Interrupt::new(host.line.try_clone().unwrap()));
    let again = Activation { features: 0, queues, interrupt, memory: memory.clone() };
    host.handle.activate(again).unwrap();
    host.run();
    assert_eq!(host.used(RECEIVE), 3);
}

#[test]
fn a_guest_that_breaks_a_rule_ends_its_machine_and_is_served_no_more() {
    let memory = memory();
    let mut host = Host::new(&memory);
    host.activate();
    host.offer(TRANSMIT, 1, WRITE, 72);
    host.kicks[TRANSMIT].write(1).unwrap();
    host.run();
    assert!(host.endings.heard().is_some());
    host.offer(TRANSMIT, 1, 0, 72);
    host.kicks[TRANSMIT].write(1).unwrap();
    host.run();
    thread::sleep(Duration::from_millis(1));
    assert_eq!((host.used(TRANSMIT), host.take()), (0, 0));
}
