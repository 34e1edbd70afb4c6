//! More interrupts than anybody could serve.

use crate::{
    driver::{self, BUFFERS, ENTROPY, WRITE},
    machine::{self, IOAPIC, LOCAL_APIC, in8, load, out8, store},
    orders::Orders,
    random::Random,
};

/// Registers of the local APIC.
const EOI: u64 = LOCAL_APIC + 0xb0;
const COMMAND: u64 = LOCAL_APIC + 0x300;
const TIMER: u64 = LOCAL_APIC + 0x320;
const INITIAL_COUNT: u64 = LOCAL_APIC + 0x380;
const DIVIDE: u64 = LOCAL_APIC + 0x3e0;

/// Interrupts of this processor to itself, a timer that always fires, pins of the IO-APIC set up at random, the interval timer as
/// fast as it goes, and devices that have something to say all the time; meanwhile interrupts are taken.
pub fn storm(random: &Random, orders: &Orders) {
    let mut ring = ENTROPY.bring_up(0);
    machine::take_interrupts();
    store(DIVIDE, 0xb_u32);
    store(TIMER, 0x2_0040_u32);
    store(INITIAL_COUNT, 20_000_u32);
    for pin in 0..24 {
        redirect(pin, (0x30 + pin) | random.of(&[0, 1 << 15, 1 << 13, 1 << 16]));
    }
    // Channel 0 as a rate generator with the smallest divisor but one.
    out8(0x43, 0x34);
    out8(0x40, 0x40);
    out8(0x40, 0);
    for _ in 0..orders.count(1000) {
        match random.below(6) {
            0 => store(COMMAND, 0x4_4000 | (0x20 + random.below(0xdf)) as u32),
            1 => redirect(random.below(24) as u32, random.word() as u32 & 0x1_a000 | 0x40),
            2 => store(EOI, 0_u32),
            3 => drop(in8(0x40)),
            4 => drop(load::<u32>(LOCAL_APIC + random.below(0x40) * 16)),
            _ => {
                ring.describe(0, BUFFERS, 16, WRITE, 0);
                ring.offer(0);
                ENTROPY.notify(0);
                ENTROPY.wait(&ring, 200);
            }
        }
    }
    machine::refuse_interrupts();
    store(TIMER, 0x1_0000_u32);
    for pin in 0..24 {
        redirect(pin, 0x1_0000);
    }
    for device in driver::ALL {
        device.reset();
    }
}

/// The low half of a redirection entry; the high half, the destination, stays 0.
fn redirect(pin: u32, entry: u32) {
    store(IOAPIC, 0x10 + pin * 2);
    store(IOAPIC + 0x10, entry);
}
