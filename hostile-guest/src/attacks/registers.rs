//! Register accesses of every width and alignment, in every state.

use crate::{
    driver::{self, Device, EVENT_IDX, SPAN, register},
    machine::{load, store},
    orders::Orders,
    random::Random,
};

/// One access of any width, anywhere in a device's page. `avoid`: aligned words are not written to this register.
fn poke(device: Device, random: &Random, avoid: u64) {
    let offset = if random.below(4) == 0 { random.below(SPAN - 8) } else { random.below(0x48) * 4 };
    let at = device.base() + offset;
    let value = random.of(&[0, 1, 3, 11, 16, 256, random.nasty()]);
    match random.below(8) {
        0 => drop(load::<u8>(at)),
        1 => drop(load::<u16>(at)),
        2 => drop(load::<u32>(at)),
        3 => drop(load::<u64>(at)),
        4 => store(at, value as u8),
        5 => store(at, value as u16),
        6 => store(at, value),
        _ if offset == avoid => {}
        // Never alive: that is another attack.
        _ if offset == register::STATUS => store(at, value as u32 & !4),
        _ => store(at, value as u32),
    }
}

/// All devices, as far as a driver can get without a queue.
pub fn all(random: &Random, orders: &Orders) {
    for _ in 0..orders.count(4000) {
        let device = random.of(&driver::ALL);
        match random.below(64) {
            0 => device.negotiate(random.word() as u32),
            1 => device.reset(),
            _ => poke(device, random, SPAN),
        }
    }
    driver::ALL.into_iter().for_each(Device::reset);
}

/// Devices that work, whose queues nothing may change any more.
pub fn live(random: &Random, orders: &Orders) {
    for device in driver::ALL {
        device.bring_up(EVENT_IDX);
    }
    for _ in 0..orders.count(4000) {
        poke(random.of(&driver::ALL), random, register::STATUS);
    }
    driver::ALL.into_iter().for_each(Device::reset);
}

/// Queues that do not exist, of devices in any state.
pub fn notify(random: &Random, orders: &Orders) {
    for round in 0..orders.count(2000) {
        let device = random.of(&driver::ALL);
        match round % 64 {
            0 => drop(device.bring_up(0)),
            32 => device.reset(),
            _ => {}
        }
        let queue = random.of(&[0, 1, 2, 3, 255, 256, 0xffff, random.nasty()]);
        let at = device.base() + register::NOTIFY;
        match random.below(4) {
            0 => store(at, queue as u8),
            1 => store(at, queue as u16),
            2 => store(at, queue),
            _ => store(at, queue as u32),
        }
    }
    driver::ALL.into_iter().for_each(Device::reset);
}
