//! A driver that can do what it should, as the ground that attacks start from (virtio 1.2, sections 2.7 and 4.2).

use crate::machine::{ARENA, load, pause, store};

const BASE: u64 = 0xd000_0000;
pub const SPAN: u64 = 0x1000;

pub mod register {
    pub const DEVICE_FEATURES: u64 = 0x10;
    pub const DEVICE_FEATURES_SEL: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SEL: u64 = 0x24;
    pub const QUEUE_SEL: u64 = 0x30;
    pub const QUEUE_NUM: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const NOTIFY: u64 = 0x50;
    pub const STATUS: u64 = 0x70;
    pub const DESC: u64 = 0x80;
    pub const DRIVER: u64 = 0x90;
    pub const DEVICE: u64 = 0xa0;
}

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// The feature bits of word 1 that every driver takes: `VIRTIO_F_VERSION_1`.
const VERSION_1: u32 = 1;
/// Of word 0.
pub const INDIRECT_DESC: u32 = 1 << 28;
pub const EVENT_IDX: u32 = 1 << 29;

/// The slots, as the monitor fills them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Device {
    slot: u64,
    pub queues: u64,
    pub size: u16,
}

pub const ROOT: Device = Device { slot: 0, queues: 1, size: 256 };
pub const SCRATCH: Device = Device { slot: 1, queues: 1, size: 256 };
pub const VSOCK: Device = Device { slot: 2, queues: 3, size: 256 };
pub const ENTROPY: Device = Device { slot: 3, queues: 1, size: 16 };
pub const ALL: [Device; 4] = [ROOT, SCRATCH, VSOCK, ENTROPY];

/// Where buffers are: behind all rings.
pub const BUFFERS: u64 = ARENA + 0x40_0000;

impl Device {
    pub fn base(self) -> u64 {
        BASE + self.slot * SPAN
    }

    pub fn read(self, register: u64) -> u32 {
        load(self.base() + register)
    }

    pub fn write(self, register: u64, value: u32) {
        store(self.base() + register, value);
    }

    pub fn notify(self, queue: u64) {
        self.write(register::NOTIFY, queue as u32);
    }

    pub fn reset(self) {
        self.write(register::STATUS, 0);
    }

    /// From reset to `FEATURES_OK`, with some of the features there are.
    pub fn negotiate(self, wanted: u32) {
        self.reset();
        self.write(register::STATUS, 1);
        self.write(register::STATUS, 3);
        self.write(register::DEVICE_FEATURES_SEL, 0);
        let offered = self.read(register::DEVICE_FEATURES);
        self.write(register::DRIVER_FEATURES_SEL, 0);
        self.write(register::DRIVER_FEATURES, offered & wanted);
        self.write(register::DRIVER_FEATURES_SEL, 1);
        self.write(register::DRIVER_FEATURES, VERSION_1);
        self.write(register::STATUS, 11);
    }

    pub fn go_live(self) {
        self.write(register::STATUS, 15);
    }

    /// Tells the device where a queue is, and makes it ready.
    pub fn place(self, queue: u64, size: u16, [desc, driver, device]: [u64; 3]) {
        self.write(register::QUEUE_SEL, queue as u32);
        self.write(register::QUEUE_NUM, u32::from(size));
        for (register, address) in
            [(register::DESC, desc), (register::DRIVER, driver), (register::DEVICE, device)]
        {
            self.write(register, address as u32);
            self.write(register + 4, (address >> 32) as u32);
        }
        self.write(register::QUEUE_READY, 1);
    }

    /// Where queue `queue` is, if it is where it should be.
    pub fn ring(self, queue: u64) -> Ring {
        let at = ARENA + self.slot * 0x10_0000 + queue * 0x1_0000;
        Ring { desc: at, avail: at + 0x2000, used: at + 0x4000, size: self.size, next: 0 }
    }

    /// All of it as it should be, with rings that are empty; returns the first.
    pub fn bring_up(self, features: u32) -> Ring {
        self.negotiate(features);
        for queue in 0..self.queues {
            let ring = self.ring(queue);
            ring.clear();
            self.place(queue, ring.size, [ring.desc, ring.avail, ring.used]);
        }
        self.go_live();
        self.ring(0)
    }

    /// Lets the monitor work, until it has used a buffer or for `patience` looks at a register.
    pub fn wait(self, ring: &Ring, patience: u32) {
        for _ in 0..patience {
            if ring.used_index() == ring.next {
                return;
            }
            self.read(register::STATUS);
            pause();
        }
    }

    /// Nothing to do but to be ended; gives up in the end.
    pub fn await_the_end(self) {
        for _ in 0..50_000 {
            self.read(register::STATUS);
        }
    }
}

/// A split ring.
pub struct Ring {
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
    pub size: u16,
    /// What `avail.idx` is.
    pub next: u16,
}

impl Ring {
    fn clear(&self) {
        crate::machine::fill(self.desc, u64::from(self.size) * 16, || 0);
        crate::machine::fill(self.avail, 0x400, || 0);
        crate::machine::fill(self.used, 0x1000, || 0);
    }

    pub fn describe(&self, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        describe(self.desc, index, address, len, flags, next);
    }

    /// Puts a chain's head in the ring, and says so.
    pub fn offer(&mut self, head: u16) {
        store(self.avail + 4 + u64::from(self.next % self.size) * 2, head);
        self.publish(self.next.wrapping_add(1));
    }

    pub fn publish(&mut self, index: u16) {
        self.next = index;
        store(self.avail + 2, index);
    }

    pub fn used_index(&self) -> u16 {
        load(self.used + 2)
    }
}

/// A descriptor in any table.
pub fn describe(table: u64, index: u16, address: u64, len: u32, flags: u16, next: u16) {
    let at = table + u64::from(index) * 16;
    store(at, address);
    store(at + 8, len);
    store(at + 12, flags);
    store(at + 14, next);
}

/// Kinds of a block request.
pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;

/// A block request's header at an address.
pub fn header(address: u64, kind: u32, sector: u64) {
    store(address, kind);
    store(address + 4, 0_u32);
    store(address + 8, sector);
}

/// A request as it should be, in three descriptors from `first` on: header, one buffer, status.
pub fn request(ring: &Ring, first: u16, kind: u32, sector: u64, len: u32) {
    let own = BUFFERS + u64::from(first) * 0x1000;
    header(own, kind, sector);
    let data = BUFFERS + 0x20_0000 + u64::from(first) * 0x1000;
    let to_guest = if kind == IN { WRITE } else { 0 };
    ring.describe(first, own, 16, NEXT, first + 1);
    ring.describe(first + 1, data, len, NEXT | to_guest, first + 2);
    ring.describe(first + 2, own + 16, 1, WRITE, 0);
}
