//! A machine written out and taken up again: a state file, which is small and checked in every byte, and a memory
//! file, which every clone maps privately and nobody writes again.
//!
//! The monitor is handed both files open and empty, and syncs them; that they appear under their names complete or not
//! at all is the business of whoever made them. Whatever is read here may be damaged or made up: each claim is checked
//! before anything is built on it.

mod file;
mod memory;

pub use file::{CAP, decode, encode};
pub use memory::{MemoryLayout, guest_ranges, map, populate, read_singly, write};

use crate::{Error, cpu::VcpuState, devices::virtio::transport::TransportState};
use kvm_bindings::{kvm_clock_data, kvm_cpuid_entry2, kvm_irqchip, kvm_pit_state2};
use serde::{Deserialize, Serialize};

/// A paused machine, without its memory.
#[derive(Debug, Serialize, Deserialize)]
pub struct MachineState {
    pub memory: MemoryLayout,
    pub vcpus: Vec<VcpuState>,
    /// The two PICs and the IO-APIC.
    pub irqchips: Vec<kvm_irqchip>,
    pub pit: kvm_pit_state2,
    pub clock: kvm_clock_data,
    /// In the order of their slots.
    pub devices: Vec<DeviceState>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeviceState {
    /// Virtio device id: a slot that holds another device than it did is found before anything is restored.
    pub id: u32,
    pub transport: TransportState,
}

/// Refuses a machine that this host's processor cannot go on with.
///
/// A clone keeps the features it was booted with, so each of them has to be there. Which are compared: every feature
/// word KVM reports; topology, which is per machine, and counters that differ from read to read are not features.
pub fn check_processor(saved: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2]) -> Result<(), Error> {
    for entry in saved {
        let on_host = host
            .iter()
            .find(|other| other.function == entry.function && other.index == entry.index)
            .copied()
            .unwrap_or_default();
        if let Some(register) = missing(entry, &on_host) {
            return Err(Error::Snapshot(format!(
                "this host's processor lacks a feature of the one it was taken on: leaf {:#x}.{}, {register}",
                entry.function, entry.index
            )));
        }
    }
    Ok(())
}

/// The register in which `saved` has a feature bit that `host` has not.
fn missing(saved: &kvm_cpuid_entry2, host: &kvm_cpuid_entry2) -> Option<String> {
    /// KVM leaves these two to the monitor, which sets them whatever the host reports.
    const ALWAYS: u32 = (1 << 24) | (1 << 31);
    const HTT: u32 = 1 << 28;
    let words = match (saved.function, saved.index) {
        // Vendor, family, model and stepping: another processor is refused outright.
        (0x0, _) => {
            let same = (saved.ebx, saved.ecx, saved.edx) == (host.ebx, host.ecx, host.edx);
            return (!same).then(|| "another vendor".to_owned());
        }
        (0x1, _) if saved.eax != host.eax => {
            return Some(format!("another model ({:#x}, here {:#x})", saved.eax, host.eax));
        }
        (0x1, _) => [("ecx", saved.ecx & !ALWAYS, host.ecx), ("edx", saved.edx & !HTT, host.edx), ("", 0, 0)],
        (0x7, _) => {
            [("ebx", saved.ebx, host.ebx), ("ecx", saved.ecx, host.ecx), ("edx", saved.edx, host.edx)]
        }
        (0xd, 1) => [("eax", saved.eax, host.eax), ("", 0, 0), ("", 0, 0)],
        (0x8000_0001, _) => [("ecx", saved.ecx, host.ecx), ("edx", saved.edx, host.edx), ("", 0, 0)],
        (0x8000_0008, _) => [("ebx", saved.ebx, host.ebx), ("", 0, 0), ("", 0, 0)],
        (0x4000_0001, _) => [("eax", saved.eax, host.eax), ("", 0, 0), ("", 0, 0)],
        _ => return None,
    };
    words
        .into_iter()
        .find(|(_, saved, host)| saved & !host != 0)
        .map(|(name, saved, host)| format!("{name} bits {:#x}", saved & !host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, ecx: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, ecx, ..Default::default() }
    }

    #[test]
    fn a_processor_with_every_saved_feature_will_do_and_one_with_a_feature_less_will_not() {
        let host = [leaf(0, 7), leaf(1, 0b111), leaf(7, 0b1)];
        assert!(check_processor(&[leaf(0, 7), leaf(1, 0b101), leaf(7, 0)], &host).is_ok());
        assert!(check_processor(&[leaf(0, 7), leaf(1, (1 << 31) | 0b1)], &host).is_ok());
        for (saved, names) in [(leaf(1, 0b1001), "0x8"), (leaf(7, 0b10), "0x2"), (leaf(0, 8), "vendor")] {
            let refused = check_processor(&[saved], &host).unwrap_err().to_string();
            assert!(refused.contains(names), "{refused}");
        }
    }
}
