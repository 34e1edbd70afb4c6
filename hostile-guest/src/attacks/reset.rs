//! Devices reset while they work.

use crate::{
    driver::{
        self, BUFFERS, ENTROPY, EVENT_IDX, FLUSH, IN, ROOT, SCRATCH, VSOCK, WRITE, header, register, request,
    },
    machine::store,
    orders::Orders,
    random::Random,
};

/// Rings full of requests, notified, and reset at once or a moment later; then everything anew.
pub fn in_flight(random: &Random, orders: &Orders) {
    for _ in 0..orders.count(100) {
        let device = random.of(&driver::ALL);
        let mut ring = device.bring_up(random.of(&[0, EVENT_IDX]));
        if device == ENTROPY {
            for at in 0..16 {
                ring.describe(at, BUFFERS, 4096, WRITE, 0);
                ring.offer(at);
            }
        } else if device == VSOCK {
            // Room for packets, and packets: to the host, from somebody we are not, with nothing in them.
            for at in 0..64 {
                ring.describe(at, BUFFERS + u64::from(at) * 0x1000, 4096, WRITE, 0);
                ring.offer(at);
            }
            let mut out = VSOCK.ring(1);
            for at in 0..64 {
                let packet = BUFFERS + 0x10_0000 + u64::from(at) * 64;
                store(packet, random.of(&[3, random.word()]));
                store(packet + 8, 2_u64);
                store(packet + 16, random.word());
                store(packet + 24, random.of(&[0, 4096, random.word()]));
                store(packet + 32, random.word());
                store(packet + 40, random.word() as u32);
                out.describe(at, packet, 44, 0, 0);
                out.offer(at);
            }
            VSOCK.notify(1);
        } else if device == ROOT || device == SCRATCH {
            for first in (0..248).step_by(4) {
                request(&ring, first, IN, random.below(1000), 4096);
                ring.offer(first);
            }
            // The scratch disk is ours to spoil.
            header(BUFFERS, random.of(&[IN, FLUSH]), 0);
        }
        device.notify(0);
        device.wait(&ring, random.of(&[0, 0, 1, 5, 20]));
        match random.below(3) {
            // Given up first, which leaves the queues with the device.
            0 => {
                device.write(register::STATUS, 128);
                device.reset();
            }
            1 => {
                device.reset();
                device.reset();
            }
            _ => device.reset(),
        }
    }
}
