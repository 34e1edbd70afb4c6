//! The network device's worker, both ways, against any rings, tables and memory. See the library for the layout of an input.
//!
//! Flags: bits 1 to 6 are the offloads negotiated. Knobs: how the outside behaves, two bits a call, again from the start when
//! used up. A step of the fourth kind brings a frame of the length it names.
//!
//! What must hold: only the guest's rule-breaking ends the machine; nothing is taken from the outside without room for all
//! of it, nothing sent that was not negotiated; frames come from and go to guest memory only; a pass is of bounded length, and
//! one that could not go on leaves the ring as it was.

#![no_main]

use bivouac_fuzz::{Guest, Input, Step, mappings, must_be_guest_memory, total};
use bivouac_vmm::{
    Error,
    devices::virtio::net::{
        BUDGET, FRAME_MAX, Frames, HEADER_LEN, NetWorker, Pause, QUEUES, RECEIVE, feature,
    },
};
use libfuzzer_sys::fuzz_target;
use std::{cell::Cell, collections::VecDeque, io, ops::Range, rc::Rc};
use virtio_queue::QueueT;

const OFFLOADS: [u64; 6] = [
    feature::CSUM,
    feature::GUEST_CSUM,
    feature::GUEST_TSO4,
    feature::GUEST_TSO6,
    feature::HOST_TSO4,
    feature::HOST_TSO6,
];
const MTU: u16 = 1500;

struct Checked {
    mappings: Vec<Range<usize>>,
    features: u64,
    knobs: u16,
    calls: u32,
    incoming: Incoming,
}

/// Lengths of the frames that are there to be taken.
struct Incoming(Rc<Cell<VecDeque<usize>>>);

// SAFETY: a target has one thread.
unsafe impl Send for Incoming {}

impl Checked {
    fn behaviour(&mut self) -> u16 {
        let behaviour = self.knobs >> (self.calls % 8 * 2) & 3;
        self.calls += 1;
        behaviour
    }

    /// Header first, which is our own memory; then the guest's.
    fn check(&self, vectors: &[libc::iovec]) {
        let (header, rest) = vectors.split_first().expect("a header");
        assert!(header.iov_len == HEADER_LEN && vectors.len() <= 1024);
        for vector in rest {
            must_be_guest_memory(&self.mappings, vector);
        }
        assert!(total(vectors) <= HEADER_LEN + FRAME_MAX);
    }

    fn has(&self, bit: u64) -> bool {
        self.features & bit != 0
    }
}

impl Frames for Checked {
    fn receive(&mut self, vectors: &[libc::iovec]) -> io::Result<Option<usize>> {
        let (excess, rest) = vectors.split_last().expect("a place for what is too much");
        self.check(rest);
        assert_eq!(excess.iov_len, 1);
        let room = total(rest);
        let large = self.has(feature::GUEST_TSO4) || self.has(feature::GUEST_TSO6);
        let most = if large { FRAME_MAX } else { usize::from(MTU) + 18 };
        assert_eq!(room, HEADER_LEN + most);
        let mut incoming = self.incoming.0.take();
        let frame = incoming.pop_front();
        self.incoming.0.set(incoming);
        let Some(len) = frame else { return Ok(None) };
        // Cut as a tap would.
        let len = (HEADER_LEN + len % (FRAME_MAX + 1)).min(room + 1);
        let mut left = len;
        for vector in vectors {
            let now = vector.iov_len.min(left);
            // SAFETY: the worker's header, or within one mapping of guest memory, as was checked.
            unsafe { vector.iov_base.cast::<u8>().write_bytes(0xd1, now) };
            left -= now;
        }
        Ok(Some(len))
    }

    fn send(&mut self, vectors: &[libc::iovec]) -> io::Result<()> {
        self.check(vectors);
        // SAFETY: the worker's header, which nothing else touches during the call.
        let header = unsafe { std::slice::from_raw_parts(vectors[0].iov_base.cast::<u8>(), HEADER_LEN) };
        assert!(header[0] == 0 || header[0] == 1 && self.has(feature::CSUM));
        assert!(match header[1] {
            0 => true,
            1 => self.has(feature::HOST_TSO4),
            4 => self.has(feature::HOST_TSO6),
            _ => false,
        });
        match self.behaviour() {
            1 => Err(io::ErrorKind::WouldBlock.into()),
            2 => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            _ => Ok(()),
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut guest = Guest::new(&mut Input::new(bytes), QUEUES);
    let chosen = OFFLOADS.iter().enumerate().filter(|(at, _)| guest.flags >> (at + 1) & 1 != 0);
    let features = chosen.map(|(_, bit)| bit).sum();
    let incoming = Rc::new(Cell::new(VecDeque::from([60, 1514, 65_550])));
    let frames = Checked {
        mappings: mappings(&guest.memory),
        features,
        knobs: guest.knobs,
        calls: 0,
        incoming: Incoming(incoming.clone()),
    };
    let mut worker = NetWorker::new(frames, MTU);
    worker.negotiated(features);
    let steps = std::mem::take(&mut guest.steps);
    for step in (0..QUEUES).map(Step::Kick).chain(steps) {
        match step {
            Step::Kick(index) => {
                let queue = &mut guest.queues[index];
                let (used, avail) = (queue.next_used(), queue.next_avail());
                let pass = match index {
                    RECEIVE => worker.receive(queue, &guest.memory),
                    _ => worker.transmit(queue, &guest.memory),
                };
                match pass {
                    Ok(pass) => {
                        let moved = queue.next_used().wrapping_sub(used);
                        assert_eq!(queue.next_avail().wrapping_sub(avail), moved, "something is in flight");
                        assert!(usize::from(moved) <= BUDGET && (moved > 0 || !pass.interrupt));
                        assert!(
                            pass.pause != Pause::BudgetSpent
                                || index == RECEIVE
                                || usize::from(moved) == BUDGET
                        );
                    }
                    Err(Error::Guest { .. }) => return,
                    Err(other) => panic!("{other}"),
                }
            }
            Step::Offer(queue, index) => guest.offer(queue, index),
            Step::Touch(queue, number) => guest.touch(queue, number),
            Step::Other(_, len) => {
                let mut frames = incoming.take();
                frames.push_back(len.into());
                incoming.set(frames);
            }
        }
    }
});
