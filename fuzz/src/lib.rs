//! What the targets share: how bytes become a guest that has set up its queues.
//!
//! An input of the device targets (block, net) is read from the front; what is missing at its end is zero.
//!
//! | bytes | what |
//! | --- | --- |
//! | 1 | queue size: 2 to the power of this modulo 9 |
//! | 1 | bit 0: event indexes; the others are the target's |
//! | 2 | where both rings begin to count |
//! | 2 | the target's |
//! | 1 | number of steps, modulo 32 |
//! | 4 each | the steps, see [`Step`] |
//! | per queue, 16 × size + 2 × size + 6 | descriptor table, then available ring |
//! | the rest | guest memory from [`BUFFERS`] on |
//!
//! Numbers are little-endian. Queue `i` has its table at `i` × [`QUEUE_SPAN`], its available ring at [`AVAIL`] and its used
//! ring at [`USED`] from there. Memory is four regions, two pairs that touch, with a hole between the pairs.

mod spy;

pub use spy::{OFFERED, Spy, Told};

use bivouac_vmm::memory::Memory;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::OnceCell,
    ops::Range,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

/// Start and length of each region.
pub const REGIONS: [(u64, usize); 4] =
    [(0, 0x8000), (0x8000, 0x4000), (0x1_0000, 0x4000), (0x1_4000, 0x4000)];
pub const QUEUE_SPAN: u64 = 0x2000;
pub const AVAIL: u64 = 0x1000;
pub const USED: u64 = 0x1400;
/// Four KiB below the border of the first two regions.
pub const BUFFERS: u64 = 0x7000;
pub const SIZE_MAX: u16 = 256;

/// Allocates, and ends the process rather than give more than [`ALLOCATION_MAX`] at once: whoever asks for that goes by the
/// measure of something outside. libFuzzer's own limit needs the address sanitizer.
struct Limited;

/// Bytes. The largest that is right is the body of a frame, which its encoder makes room for by doubling.
const ALLOCATION_MAX: usize = 4 << 20;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

// SAFETY: the system's allocator, or no return at all.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        limit(layout.size());
        // SAFETY: what is asked of the caller here is asked of it there.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        limit(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        limit(size);
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

fn limit(size: usize) {
    if size > ALLOCATION_MAX {
        eprintln!("ERROR: an allocation of {size} bytes");
        std::process::abort();
    }
}

/// Reads an input from its front.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next `len` bytes, or as many as there are.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (now, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        now
    }

    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }

    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }
}

/// What the guest does next, from four bytes: what, which queue, and a number.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    /// It notifies queue `.0`.
    Kick(usize),
    /// It says how far the available ring of queue `.0` goes.
    Offer(usize, u16),
    /// It changes descriptor `.1` of queue `.0`, after the device may have looked at it.
    Touch(usize, u16),
    /// Up to the target.
    Other(u8, u16),
}

/// A guest that has set up its queues.
pub struct Guest {
    pub memory: Memory,
    pub queues: Vec<Queue>,
    pub flags: u8,
    pub knobs: u16,
    pub steps: Vec<Step>,
}

thread_local! {
    /// Mapped once: a mapping for each input takes longer than the input.
    static MEMORY: OnceCell<Memory> = const { OnceCell::new() };
}

fn fresh_memory() -> Memory {
    let memory = MEMORY.with(|memory| {
        let ranges = REGIONS.map(|(start, len)| (GuestAddress(start), len));
        memory.get_or_init(|| Memory::from_ranges(&ranges).expect("room for guest memory")).clone()
    });
    for (start, len) in REGIONS {
        memory.write_slice(&vec![0; len], GuestAddress(start)).expect("regions are memory");
    }
    memory
}

impl Guest {
    pub fn new(input: &mut Input<'_>, queues: usize) -> Self {
        let memory = fresh_memory();
        let size = 1_u16 << (input.byte() % 9);
        let flags = input.byte();
        let count = input.short();
        let knobs = input.short();
        let steps = (0..input.byte() % 32).map(|_| step(input, queues)).collect();
        let queues = (0..queues as u64)
            .map(|index| {
                let start = index * QUEUE_SPAN;
                put(&memory, start, input.bytes(16 * usize::from(size)));
                put(&memory, start + AVAIL, input.bytes(2 * usize::from(size) + 6));
                let mut queue = Queue::new(SIZE_MAX).expect("a power of two");
                queue.set_size(size);
                queue.set_desc_table_address(Some(start as u32), Some(0));
                queue.set_avail_ring_address(Some((start + AVAIL) as u32), Some(0));
                queue.set_used_ring_address(Some((start + USED) as u32), Some(0));
                queue.set_next_avail(count);
                queue.set_next_used(count);
                queue.set_event_idx(flags & 1 != 0);
                queue.set_ready(true);
                assert!(queue.is_valid(&memory));
                queue
            })
            .collect();
        let room = REGIONS[0].1 + REGIONS[1].1 - BUFFERS as usize;
        put(&memory, BUFFERS, input.bytes(room));
        Self { memory, queues, flags, knobs, steps }
    }

    pub fn offer(&self, queue: usize, index: u16) {
        put(&self.memory, queue as u64 * QUEUE_SPAN + AVAIL + 2, &index.to_le_bytes());
    }

    pub fn touch(&self, queue: usize, number: u16) {
        let at = queue as u64 * QUEUE_SPAN + u64::from(number % 256) * 16;
        put(&self.memory, at + 8, &number.to_le_bytes());
    }
}

fn step(input: &mut Input<'_>, queues: usize) -> Step {
    let (what, which, number) = (input.byte(), input.byte(), input.short());
    let queue = usize::from(which) % queues;
    match what % 4 {
        0 => Step::Kick(queue),
        1 => Step::Offer(queue, number),
        2 => Step::Touch(queue, number),
        _ => Step::Other(which, number),
    }
}

fn put(memory: &Memory, at: u64, bytes: &[u8]) {
    memory.write_slice(bytes, GuestAddress(at)).expect("inside the first regions");
}

/// Where the pages of guest memory are in this process.
pub fn mappings(memory: &Memory) -> Vec<Range<usize>> {
    let mapping = |region: &<Memory as GuestMemoryBackend>::R| {
        let start = region.get_host_address(MemoryRegionAddress(0)).expect("mapped") as usize;
        start..start + region.len() as usize
    };
    memory.iter().map(mapping).collect()
}

/// # Panics
/// When a vector is not within one mapping of guest memory.
pub fn must_be_guest_memory(mappings: &[Range<usize>], vector: &libc::iovec) {
    let start = vector.iov_base as usize;
    let end = start.checked_add(vector.iov_len).expect("a vector wraps");
    let inside = mappings.iter().any(|mapping| mapping.start <= start && end <= mapping.end);
    assert!(inside, "a vector of {} bytes is outside guest memory", vector.iov_len);
}

/// Bytes in all of `vectors`.
pub fn total(vectors: &[libc::iovec]) -> usize {
    vectors.iter().map(|vector| vector.iov_len).sum()
}
