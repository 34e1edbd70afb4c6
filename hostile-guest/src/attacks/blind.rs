//! Where nothing is known to be: ports, the gap below 4 GiB, hypercalls, and code that is none.

use crate::{
    driver::BUFFERS,
    machine::{self, IOAPIC, LOCAL_APIC},
    orders::Orders,
    random::Random,
};

/// The keyboard controller's command port, by which this program says that it is done.
const RESET: u16 = 0x64;
const PORTS: u64 = 0x1_0000;

/// Every port there is, once each if the count allows, in every width, and strings of bytes to a few.
pub fn ports(random: &Random, orders: &Orders) {
    let count = orders.count(PORTS).min(PORTS);
    for at in 0..count {
        let port = at as u16;
        let value = random.nasty();
        match random.below(6) {
            0 => drop(machine::in8(port)),
            1 => drop(machine::in16(port)),
            2 => drop(machine::in32(port)),
            _ if port == RESET => {}
            3 => machine::out8(port, value as u8),
            4 => machine::out16(port, value as u16),
            _ => machine::out32(port, value as u32),
        }
    }
    for _ in 0..count.min(64) {
        let port = random.of(&[0x60, 0x61, 0x62, 0x63, 0x3f8, 0x3fd, 0xcf8, random.word() as u16]);
        machine::in_string(port, BUFFERS, random.below(4096));
        if port != RESET {
            // Each byte is an exit of its own.
            machine::out_string(port, BUFFERS, random.below(64));
        }
    }
    // More at once than the keyboard controller's registers are wide: no reset.
    machine::store(BUFFERS, u64::from_le_bytes([0xfe; 8]));
    machine::out_string(RESET, BUFFERS, 1.max(random.below(2)) + 1);
    machine::out32(RESET, 0xfefe_fefe);
}

/// The addresses between memory and 4 GiB, and beyond, all but the interrupt controllers' own pages.
pub fn gap(random: &Random, orders: &Orders) {
    for _ in 0..orders.count(4000) {
        let at = match random.below(3) {
            0 => machine::MEMORY + random.below((5 << 30) - machine::MEMORY - 8),
            1 => 0xd000_4000 + random.below(0x1_0000),
            _ => 0xc000_0000 + random.below(0x4000_0000 - 8),
        };
        let page = at & !0xfff;
        if [LOCAL_APIC, IOAPIC, 0xd000_0000, 0xd000_1000, 0xd000_2000, 0xd000_3000].contains(&page)
            || [LOCAL_APIC, IOAPIC].contains(&(page + 0x1000))
        {
            continue;
        }
        match random.below(8) {
            0 => drop(machine::load::<u8>(at)),
            1 => drop(machine::load::<u16>(at)),
            2 => drop(machine::load::<u32>(at)),
            3 => drop(machine::load::<u64>(at)),
            4 => machine::store(at, random.word() as u8),
            5 => machine::store(at, random.word() as u32),
            6 => machine::store(at, random.word()),
            _ => machine::copy_string(at & !0xfff, BUFFERS, random.below(64)),
        }
    }
}

/// Code in a device's registers, or nowhere.
pub fn execute(_: &Random, orders: &Orders) {
    machine::execute([0xd000_0000, machine::NOWHERE, 0xc000_0000, LOCAL_APIC][(orders.seed % 4) as usize])
}

/// Calls into KVM with any number and argument.
pub fn hypercalls(random: &Random, orders: &Orders) {
    for _ in 0..orders.count(2000) {
        let number = random.of(&[random.below(16), random.below(16), random.nasty()]);
        machine::hypercall(number, random.nasty());
    }
}

/// What a kernel that lost control ends in.
pub fn crash(_: &Random, _: &Orders) {
    machine::triple_fault()
}
