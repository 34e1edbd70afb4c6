//! The MP table (Intel MultiProcessor Specification 1.4): how a kernel without ACPI learns its processors, its IO-APIC
//! and where each interrupt goes.

use crate::{Error, layout, memory::Memory};
use vm_memory::{Bytes, GuestAddress};

/// Version of a local APIC that is on the chip.
const APIC_VERSION: u8 = 0x14;
/// One ISA bus, whose interrupts are wired to the same pins of the IO-APIC.
const ISA_BUS: u8 = 0;

const ENTRY_PROCESSOR: u8 = 0;
const ENTRY_BUS: u8 = 1;
const ENTRY_IOAPIC: u8 = 2;
const ENTRY_INTERRUPT: u8 = 3;
const ENTRY_LOCAL_INTERRUPT: u8 = 4;
const INTERRUPT_INT: u8 = 0;
const INTERRUPT_NMI: u8 = 1;
const INTERRUPT_EXTINT: u8 = 3;
const CPU_ENABLED: u8 = 1;
const CPU_BOOTSTRAP: u8 = 2;

/// Writes the table for `vcpus` processors with APIC ids 0 and up. `interrupts`: those that something is connected to. The
/// kernel sets up each one that is listed, register by register, and every register access of the IO-APIC is an exit.
pub fn write(memory: &Memory, vcpus: u8, interrupts: &[u8]) -> Result<(), Error> {
    let table = build(vcpus, interrupts)?;
    memory
        .write_slice(&table, GuestAddress(layout::MPTABLE))
        .map_err(|e| Error::Kernel(format!("processor table: {e}")))
}

fn build(vcpus: u8, interrupts: &[u8]) -> Result<Vec<u8>, Error> {
    let ioapic_id = vcpus;
    let mut entries = Vec::new();
    let mut count: u16 = 0;
    let mut push = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        count += 1;
    };

    for id in 0..vcpus {
        let flags = CPU_ENABLED | if id == 0 { CPU_BOOTSTRAP } else { 0 };
        let mut entry = vec![ENTRY_PROCESSOR, id, APIC_VERSION, flags];
        entry.extend_from_slice(&0x600_u32.to_le_bytes()); // signature: family 6; Linux reads CPUID instead
        entry.extend_from_slice(&0x201_u32.to_le_bytes()); // features: FPU and APIC
        entry.extend_from_slice(&[0; 8]);
        push(&entry);
    }
    push(&[ENTRY_BUS, ISA_BUS, b'I', b'S', b'A', b' ', b' ', b' ']);
    let mut ioapic = vec![ENTRY_IOAPIC, ioapic_id, APIC_VERSION, 1];
    ioapic.extend_from_slice(&layout::IOAPIC.to_le_bytes());
    push(&ioapic);
    for irq in interrupts {
        push(&[ENTRY_INTERRUPT, INTERRUPT_INT, 0, 0, ISA_BUS, *irq, ioapic_id, *irq]);
    }
    push(&[ENTRY_LOCAL_INTERRUPT, INTERRUPT_EXTINT, 0, 0, ISA_BUS, 0, 0, 0]);
    push(&[ENTRY_LOCAL_INTERRUPT, INTERRUPT_NMI, 0, 0, ISA_BUS, 0, 0xff, 1]);

    // Configuration table header, 44 bytes.
    let mut config = b"PCMP".to_vec();
    let length = 44 + entries.len();
    config.extend_from_slice(&(length as u16).to_le_bytes());
    config.extend_from_slice(&[4, 0]); // specification 1.4; checksum, below
    config.extend_from_slice(b"BIVOUAC MICROVM     ");
    config.extend_from_slice(&[0; 6]); // no OEM table
    config.extend_from_slice(&count.to_le_bytes());
    config.extend_from_slice(&layout::LOCAL_APIC.to_le_bytes());
    config.extend_from_slice(&[0; 4]);
    config.extend_from_slice(&entries);
    config[7] = checksum(&config);

    // Floating pointer, 16 bytes, which names the table that follows it.
    let mut table = b"_MP_".to_vec();
    table.extend_from_slice(&(layout::MPTABLE as u32 + 16).to_le_bytes());
    table.extend_from_slice(&[1, 4, 0, 0, 0, 0, 0, 0]);
    table[10] = checksum(&table);
    table.extend_from_slice(&config);
    if table.len() > layout::MPTABLE_MAX {
        return Err(Error::Config(format!("{vcpus} processors do not fit the MP table")));
    }
    Ok(table)
}

/// The byte that makes all of them add up to zero.
fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0_u8, |sum, b| sum.wrapping_add(*b)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_checksums_hold_and_the_largest_machine_fits() {
        for vcpus in [1, 2, 8, 32] {
            let every: Vec<u8> = (0..24).collect();
            let table = build(vcpus, &every).unwrap();
            assert_eq!(checksum(&table[..16]), 0);
            assert_eq!(checksum(&table[16..]), 0);
            assert_eq!(usize::from(u16::from_le_bytes([table[20], table[21]])), table.len() - 16);
        }
    }
}
