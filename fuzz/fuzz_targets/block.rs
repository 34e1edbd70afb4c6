//! The block device's worker against any ring, table and memory. See the library for the layout of an input.
//!
//! Flags: bit 1, the disk is read-only. Knobs: how the storage behaves, two bits a call, again from the start when used up.
//!
//! What must hold: only the guest's rule-breaking ends the machine; the storage is asked for nothing that is not on the disk
//! and writes nothing if that is read-only; data comes from and goes to guest memory only.

#![no_main]

use bivouac_fuzz::{Guest, Input, Step, mappings, must_be_guest_memory, total};
use bivouac_vmm::{
    Error,
    devices::virtio::{
        block::{BlockWorker, Disk, REQUEST_MAX, SECTOR, Storage},
        runner::{BUDGET, drain},
    },
};
use libfuzzer_sys::fuzz_target;
use std::{io, ops::Range};
use virtio_queue::QueueT;

const SECTORS: u64 = 64;

struct Checked {
    mappings: Vec<Range<usize>>,
    read_only: bool,
    knobs: u16,
    calls: u32,
}

impl Checked {
    /// How many of the bytes asked for the storage moves.
    fn call(&mut self, vectors: &[libc::iovec], offset: u64) -> io::Result<usize> {
        let bytes = total(vectors);
        assert!(!vectors.is_empty() && vectors.len() <= 1024 && bytes > 0 && bytes as u64 <= REQUEST_MAX);
        assert!(offset + bytes as u64 <= SECTORS * SECTOR, "beyond the end of the disk");
        for vector in vectors {
            must_be_guest_memory(&self.mappings, vector);
        }
        let behaviour = self.knobs >> (self.calls % 8 * 2) & 3;
        self.calls += 1;
        match behaviour {
            // Not for ever.
            1 if self.calls < 100 => Err(io::ErrorKind::Interrupted.into()),
            2 => Ok(bytes.div_ceil(2)),
            3 => Err(io::ErrorKind::Other.into()),
            _ => Ok(bytes),
        }
    }
}

impl Storage for Checked {
    fn read(&mut self, vectors: &[libc::iovec], offset: u64) -> io::Result<usize> {
        let moved = self.call(vectors, offset)?;
        let mut left = moved;
        for vector in vectors {
            let now = vector.iov_len.min(left);
            // SAFETY: within one mapping of guest memory, as was checked.
            unsafe { vector.iov_base.cast::<u8>().write_bytes(0xd1, now) };
            left -= now;
        }
        Ok(moved)
    }

    fn write(&mut self, vectors: &[libc::iovec], offset: u64) -> io::Result<usize> {
        assert!(!self.read_only, "a write to a read-only disk");
        self.call(vectors, offset)
    }

    fn flush(&mut self) -> io::Result<()> {
        assert!(!self.read_only, "a flush of a read-only disk");
        Ok(())
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut guest = Guest::new(&mut Input::new(bytes), 1);
    let read_only = guest.flags & 2 != 0;
    let file = Checked { mappings: mappings(&guest.memory), read_only, knobs: guest.knobs, calls: 0 };
    let mut worker = BlockWorker::new(Disk { file, bytes: SECTORS * SECTOR, read_only, name: "fuzz" });
    let steps = std::mem::take(&mut guest.steps);
    for step in std::iter::once(Step::Kick(0)).chain(steps) {
        match step {
            Step::Kick(_) | Step::Other(..) => {
                let before = guest.queues[0].next_used();
                match drain(&mut worker, &mut guest.queues[0], &guest.memory) {
                    Ok(drained) => {
                        let served = usize::from(guest.queues[0].next_used().wrapping_sub(before));
                        assert!(served <= BUDGET && (drained.more == (served == BUDGET)));
                        assert!(served > 0 || !drained.interrupt);
                    }
                    Err(Error::Guest { .. }) => return,
                    Err(other) => panic!("{other}"),
                }
            }
            Step::Offer(queue, index) => guest.offer(queue, index),
            Step::Touch(queue, number) => guest.touch(queue, number),
        }
    }
});
