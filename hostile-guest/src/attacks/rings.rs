//! Rings and requests that lie.
//!
//! Each variant of what ends a machine breaks one rule; the seed chooses it.

use crate::{
    driver::{
        self, BUFFERS, Device, ENTROPY, EVENT_IDX, FLUSH, IN, INDIRECT, INDIRECT_DESC, NEXT, OUT, ROOT, Ring,
        SCRATCH, VSOCK, WRITE, describe, header, request,
    },
    machine::{self, MEMORY, NOWHERE, store},
    orders::Orders,
    random::Random,
};

const FEATURES: u32 = INDIRECT_DESC | EVENT_IDX;
/// Room for an indirect table, and for what it names.
const TABLE: u64 = BUFFERS + 0x10_0000;
/// As long as the longest table a chain of 64 KiB entries can have.
const TABLE_MAX: u64 = 0x10_0000;

fn disk(seed: u64) -> Device {
    [ROOT, SCRATCH][(seed % 2) as usize]
}

/// Offers what stands at descriptor 0, and waits to be ended for it.
fn offer_and_end(device: Device, ring: &mut Ring) {
    ring.offer(0);
    device.notify(0);
    device.await_the_end();
}

/// The available index is further ahead than the ring is long.
pub fn index(_: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(FEATURES);
    ring.publish([257, 0x8000, 0xffff, 300][(orders.seed % 4) as usize]);
    device.notify(0);
    device.await_the_end();
}

/// The ring names descriptors that the table does not have.
pub fn entry(_: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(FEATURES);
    ring.offer([256, 0xffff, 0x8000, 1000][(orders.seed % 4) as usize]);
    device.notify(0);
    device.await_the_end();
}

/// More segments than any request has.
pub fn endless_chain(_: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(FEATURES);
    let count = [257, 4096, 0x7fff, 0xffff][(orders.seed % 4) as usize];
    for at in 0..count {
        let next = if at + 1 < count { NEXT } else { 0 };
        describe(TABLE, at, BUFFERS, 0, next | if at == 0 { 0 } else { WRITE }, at + 1);
    }
    ring.describe(0, TABLE, u32::from(count) * 16, INDIRECT, 0);
    offer_and_end(device, &mut ring);
}

/// A chain that comes back to where it was.
pub fn looping_chain(_: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(FEATURES);
    header(BUFFERS, IN, 0);
    match orders.seed % 4 {
        0 => ring.describe(0, BUFFERS, 16, NEXT, 0),
        1 => {
            ring.describe(0, BUFFERS, 16, NEXT, 1);
            ring.describe(1, BUFFERS + 0x1000, 512, NEXT | WRITE, 0);
        }
        2 => (0..256).for_each(|at| ring.describe(at, BUFFERS, 16, NEXT, (at + 1) % 256)),
        _ => {
            // In a table of its own.
            (0..4).for_each(|at| describe(TABLE, at, BUFFERS, 16, NEXT, (at + 1) % 4));
            ring.describe(0, TABLE, 64, INDIRECT, 0);
        }
    }
    offer_and_end(device, &mut ring);
}

/// A table that is none.
pub fn indirect(_: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(FEATURES);
    header(BUFFERS, IN, 0);
    describe(TABLE, 0, BUFFERS, 16, NEXT, 1);
    describe(TABLE, 1, BUFFERS + 0x1000, 512, NEXT | WRITE, 2);
    describe(TABLE, 2, BUFFERS + 16, 1, WRITE, 0);
    let (address, len) = match orders.seed % 8 {
        0 => (TABLE, 0),
        1 => (TABLE, 47),
        2 => (NOWHERE, 48),
        3 => (u64::MAX - 15, 48),
        4 => (MEMORY - 16, 48),
        5 => (TABLE, 0xffff_fff0),
        6 => {
            // Tables in tables.
            describe(TABLE, 1, TABLE, 48, INDIRECT, 0);
            (TABLE, 48)
        }
        _ => {
            // A next that is not in the table.
            describe(TABLE, 0, BUFFERS, 16, NEXT, 9);
            (TABLE, 48)
        }
    };
    ring.describe(0, address, len, INDIRECT, 0);
    // Whatever was taken for a good request is answered: then nothing was broken.
    offer_and_end(device, &mut ring);
}

/// A request whose header or status is not in memory.
pub fn outside(_: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(FEATURES);
    request(&ring, 0, IN, 0, 512);
    let nowhere =
        [NOWHERE, MEMORY - 8, 0xd000_0000, u64::MAX - 7, 1 << 52, 0xfee0_0000][(orders.seed % 6) as usize];
    if orders.seed % 12 < 6 {
        ring.describe(0, nowhere, 16, NEXT, 1);
    } else {
        ring.describe(2, nowhere.max(NOWHERE), 1, WRITE, 0);
    }
    offer_and_end(device, &mut ring);
}

/// Buffers outside memory, sectors outside the disk, writes to what is read-only: errors for the driver, and no more.
pub fn outside_data(random: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(FEATURES);
    for _ in 0..orders.count(200) {
        let kind = random.of(&[IN, OUT, FLUSH, 2, 8, 11, 13, u32::MAX]);
        request(&ring, 0, kind, 0, 512);
        header(BUFFERS, kind, random.nasty());
        let flags = NEXT | random.of(&[0, WRITE]);
        // A chain of 4 GiB would end the machine, which is another attack.
        ring.describe(1, random.nasty() | NOWHERE, random.nasty() as u32 & 0x7fff_ffff, flags, 2);
        ring.offer(0);
        device.notify(0);
        device.wait(&ring, 2000);
    }
    device.reset();
}

/// More bytes than there are.
pub fn huge_length(_: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(FEATURES);
    header(BUFFERS, IN, 0);
    ring.describe(0, BUFFERS, 16, NEXT, 1);
    for at in 1..255 {
        ring.describe(at, BUFFERS, u32::MAX - (orders.seed % 4096) as u32, NEXT | WRITE, at + 1);
    }
    ring.describe(255, BUFFERS + 16, 1, WRITE, 0);
    offer_and_end(device, &mut ring);
}

/// Chains that are no block requests.
pub fn no_request(_: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(FEATURES);
    request(&ring, 0, IN, 0, 512);
    match orders.seed % 6 {
        0 => ring.describe(0, BUFFERS, 16, 0, 0),
        1 => ring.describe(0, BUFFERS, 15, NEXT, 1),
        2 => ring.describe(0, BUFFERS, 16, NEXT | WRITE, 1),
        3 => ring.describe(2, BUFFERS + 16, 0, WRITE, 0),
        4 => ring.describe(2, BUFFERS + 16, 1, 0, 0),
        _ => ring.describe(0, BUFFERS, u32::MAX / 2, NEXT, 1),
    }
    offer_and_end(device, &mut ring);
}

/// What the entropy device cannot fill.
pub fn entropy(_: &Random, orders: &Orders) {
    let mut ring = ENTROPY.bring_up(FEATURES);
    match orders.seed % 5 {
        0 => ring.describe(0, BUFFERS, 64, 0, 0),
        1 => ring.describe(0, NOWHERE, 64, WRITE, 0),
        2 => ring.describe(0, MEMORY - 8, u32::MAX, WRITE, 0),
        3 => ring.describe(0, TABLE, 16, INDIRECT, 0),
        _ => ring.describe(0, u64::MAX, u32::MAX, WRITE, 0),
    }
    offer_and_end(ENTROPY, &mut ring);
}

/// Queues where no memory is, or that were never made ready.
pub fn placement(_: &Random, orders: &Orders) {
    let device = driver::ALL[(orders.seed % 4) as usize];
    device.negotiate(FEATURES);
    let ring = device.ring(0);
    let good = [ring.desc, ring.avail, ring.used];
    for queue in 0..device.queues {
        device.place(queue, device.size, good);
    }
    device.write(driver::register::QUEUE_SEL, 0);
    device.write(driver::register::QUEUE_READY, 0);
    let mut bad = good;
    bad[(orders.seed / 4 % 3) as usize] =
        [NOWHERE, MEMORY - 16, u64::MAX - 4095, 1 << 40][(orders.seed / 12 % 4) as usize];
    if orders.seed < 48 {
        device.place(0, device.size, bad);
    }
    device.go_live();
    device.await_the_end();
}

/// Everything changes while the device looks at it.
pub fn rewrite(random: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(EVENT_IDX);
    for _ in 0..orders.count(300) {
        for first in [0, 4, 8, 12] {
            request(&ring, first, IN, 0, 512);
            ring.offer(first);
        }
        device.notify(0);
        for _ in 0..64 {
            let first = random.of(&[0_u16, 4, 8, 12]);
            // Lengths and addresses of the data, and the header: what was checked once must not be read again.
            store(ring.desc + u64::from(first + 1) * 16, random.nasty());
            store(ring.desc + u64::from(first + 1) * 16 + 8, random.nasty() as u32 & 0x7fff_ffff);
            header(BUFFERS + u64::from(first) * 0x1000, random.of(&[IN, OUT, FLUSH]), random.nasty());
        }
        device.wait(&ring, 500);
    }
    device.reset();
}

/// Rings for the host's kernel, which drives this device, that are nothing but noise.
pub fn vsock_lies(random: &Random, orders: &Orders) {
    for _ in 0..orders.count(100) {
        VSOCK.bring_up(random.of(&[0, INDIRECT_DESC, EVENT_IDX, FEATURES]));
        for queue in 0..2 {
            let mut ring = VSOCK.ring(queue);
            for at in 0..ring.size {
                let address =
                    random.of(&[BUFFERS, TABLE, NOWHERE, 0, u64::MAX - 64]).wrapping_add(random.below(4096));
                let len = random.of(&[44, 48, 4096, 65_536, random.nasty() as u32]);
                ring.describe(at, address, len, random.below(8) as u16, random.below(257) as u16);
                store(ring.avail + 4 + u64::from(at) * 2, random.below(257) as u16);
            }
            // Headers that look like packets to the host (context id 2), or to other guests.
            for at in (0..0x2000).step_by(8) {
                store(BUFFERS + at, random.of(&[2, 3, 1024, random.word()]));
            }
            ring.publish(random.of(&[1, 16, 256, 257, 0xffff]));
            VSOCK.notify(queue);
        }
        VSOCK.wait(&VSOCK.ring(1), 20);
    }
    VSOCK.reset();
}

/// Memory and rings of every device full of noise.
pub fn chaos(random: &Random, orders: &Orders) {
    for round in 0..orders.count(200) {
        let device = driver::ALL[(orders.seed.wrapping_add(round) % 4) as usize];
        let mut ring = device.bring_up(random.of(&[0, FEATURES]));
        for at in 0..ring.size {
            let address = random.of(&[BUFFERS, TABLE, ring.desc, ring.used, MEMORY, random.nasty()]);
            let len = random.of(&[0, 1, 16, 512, 4096, random.nasty() as u32]);
            let next = random.below(u64::from(ring.size) + 1) as u16;
            ring.describe(at, address.wrapping_add(random.below(64)), len, random.below(8) as u16, next);
            store(ring.avail + 4 + u64::from(at) * 2, random.below(u64::from(ring.size)) as u16);
        }
        machine::fill(BUFFERS, 0x1000, || random.nasty());
        machine::fill(TABLE, 0x1000, || random.nasty());
        let ahead = random.of(&[1, 2, ring.size]);
        ring.publish(ahead);
        device.notify(0);
        device.wait(&ring, 200);
    }
}

/// Requests without end, each of them right: the device never finds its ring empty. Ends by no doing of its own.
pub fn flood(_: &Random, orders: &Orders) {
    let device = disk(orders.seed);
    let mut ring = device.bring_up(0);
    for first in (0..252).step_by(4) {
        request(&ring, first, IN, 0, 512);
    }
    let mut first = 0;
    loop {
        if ring.next.wrapping_sub(ring.used_index()) < 60 {
            ring.offer(first);
            first = (first + 4) % 252;
            if first == 0 {
                device.notify(0);
            }
        } else {
            // Notifications end in the host's kernel; this shows the monitor that the guest is alive.
            device.read(driver::register::STATUS);
            device.notify(0);
        }
    }
}

const _: () = assert!(TABLE + TABLE_MAX <= BUFFERS + 0x20_0000);
