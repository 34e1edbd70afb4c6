//! Every path of a frame, and every way for a guest to get one wrong: on mock rings, against a scripted outside; and the
//! glue on an event loop of its own, against a socket that keeps frames apart as a tap does.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

mod checks;
mod glue;
mod receive;
mod tap;
mod transmit;

use super::{
    BUDGET, FRAME_MAX, HEADER_LEN, NetWorker, Pass, Pause, RECEIVE, TRANSMIT, feature, worker::Frames,
};
use crate::{Error, memory::Memory};
use std::{collections::VecDeque, io};
use virtio_queue::{
    Queue, QueueT,
    desc::{RawDescriptor, split::Descriptor},
    mock::MockSplitQueue,
};
use vm_memory::{Bytes, GuestAddress};

/// Two regions that touch, so that a buffer can lie in both; nothing above.
const SECOND_REGION: u64 = 0x10_0000;
const MEMORY_END: u64 = 0x20_0000;
const BUFFERS: u64 = 0x2_0000;
const TABLE: u64 = 0x1_0000;
/// From the start of a mock's rings. Its own used ring lies over the second half of the available one.
const USED: u64 = 0x4000;
const SIZE: u16 = 256;
const MTU: u16 = 1500;
/// What a receive buffer needs where large frames were not negotiated.
const ROOM: u32 = 12 + 1500 + 18;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// What the outside does, call by call, and what it was given.
#[derive(Default)]
struct Script {
    /// Frames to give, headers included; then nothing is there.
    incoming: VecDeque<Vec<u8>>,
    /// Calls of `receive`: bytes of room.
    asked: Vec<usize>,
    /// What `send` answers, in order; then success.
    answers: VecDeque<io::Result<()>>,
    /// What was sent.
    sent: Vec<Vec<u8>>,
    /// Instead of a frame.
    failure: Option<io::Error>,
    /// Claims this length for each frame.
    claim: Option<usize>,
}

impl Frames for Script {
    fn receive(&mut self, vectors: &[libc::iovec]) -> io::Result<Option<usize>> {
        self.asked.push(vectors.iter().map(|vector| vector.iov_len).sum());
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let Some(frame) = self.incoming.pop_front() else { return Ok(None) };
        let mut rest = frame.as_slice();
        for vector in vectors {
            let (now, later) = rest.split_at(rest.len().min(vector.iov_len));
            // SAFETY: the vector is memory of this test, and at least that long.
            unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), vector.iov_base.cast(), now.len()) };
            rest = later;
        }
        Ok(Some(self.claim.unwrap_or(frame.len() - rest.len())))
    }

    fn send(&mut self, vectors: &[libc::iovec]) -> io::Result<()> {
        let mut frame = Vec::new();
        for vector in vectors {
            // SAFETY: the vector is memory of this test, which nothing writes meanwhile.
            let part = unsafe { std::slice::from_raw_parts(vector.iov_base.cast::<u8>(), vector.iov_len) };
            frame.extend_from_slice(part);
        }
        let answer = self.answers.pop_front().unwrap_or(Ok(()));
        if answer.is_ok() {
            self.sent.push(frame);
        }
        answer
    }
}

fn memory() -> Memory {
    let second = usize::try_from(MEMORY_END - SECOND_REGION).unwrap();
    Memory::from_ranges(&[
        (GuestAddress(0), usize::try_from(SECOND_REGION).unwrap()),
        (GuestAddress(SECOND_REGION), second),
    ])
    .unwrap()
}

fn descriptor(address: u64, len: u32, flags: u16) -> RawDescriptor {
    RawDescriptor::from(Descriptor::new(address, len, flags, 0))
}

fn queue_of(mock: &MockSplitQueue<Memory>) -> Queue {
    let mut queue: Queue = mock.create_queue().unwrap();
    queue.set_used_ring_address(Some(u32::try_from(mock.start().0 + USED).unwrap()), Some(0));
    queue
}

/// One queue, its worker, and what the driver put into the ring.
struct Bench<'a> {
    memory: &'a Memory,
    mock: MockSplitQueue<'a, Memory>,
    queue: Queue,
    worker: NetWorker<Script>,
    table_used: u16,
}

impl<'a> Bench<'a> {
    fn new(memory: &'a Memory, features: u64) -> Self {
        let mock = MockSplitQueue::create(memory, GuestAddress(0), SIZE);
        let queue = queue_of(&mock);
        let mut worker = NetWorker::new(Script::default(), MTU);
        worker.negotiated(features);
        Self { memory, mock, queue, worker, table_used: 0 }
    }

    /// Offers one chain.
    fn offer(&mut self, chain: &[RawDescriptor]) {
        let first = self.table_used;
        let last = chain.len() - 1;
        let linked: Vec<_> = chain
            .iter()
            .zip(first..)
            .enumerate()
            .map(|(at, (one, index))| {
                let one = Descriptor::from(*one);
                let flags = one.flags() | if at < last { NEXT } else { 0 };
                RawDescriptor::from(Descriptor::new(one.addr().0, one.len(), flags, index + 1))
            })
            .collect();
        self.mock.add_desc_chains(&linked, first).unwrap();
        self.table_used += u16::try_from(chain.len()).unwrap();
    }

    fn receive(&mut self) -> Result<Pass, Error> {
        self.worker.receive(&mut self.queue, self.memory)
    }

    fn transmit(&mut self) -> Result<Pass, Error> {
        self.worker.transmit(&mut self.queue, self.memory)
    }

    /// Length of each entry of the used ring.
    fn used(&self) -> Vec<u32> {
        let count = self.queue.next_used();
        let len = |at: u16| self.memory.read_obj(GuestAddress(USED + 8 + 8 * u64::from(at))).unwrap();
        (0..count).map(len).collect()
    }

    fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }
}

/// A frame as the tap gives it: a header of ones but for the two bytes the kernel leaves alone, then `len` bytes.
fn frame(len: usize) -> Vec<u8> {
    let mut frame = vec![1; HEADER_LEN + len];
    for (at, byte) in frame.iter_mut().enumerate().skip(HEADER_LEN) {
        *byte = at as u8;
    }
    frame
}

fn guest_broke(outcome: &Result<Pass, Error>) -> bool {
    matches!(outcome, Err(Error::Guest { device: "net", .. }))
}
