//! What the guest is told about its processor: everything KVM supports on this host, with this machine's topology.

use crate::Error;
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

/// ECX of leaf 1.
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// EDX of leaf 1: the logical processor count in EBX is valid.
const HTT: u32 = 1 << 28;

pub fn supported(kvm: &Kvm) -> Result<CpuId, Error> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::kvm("read the processor features KVM supports"))
}

/// The table for processor `id` of `count`. One package, one thread per core, APIC ids equal to processor numbers.
pub fn for_vcpu(supported: &CpuId, id: u8, count: u8) -> Result<CpuId, Error> {
    let (id, count) = (u32::from(id), u32::from(count));
    let id_bits = count.next_power_of_two().trailing_zeros();
    let entries: Vec<kvm_cpuid_entry2> =
        supported.as_slice().iter().map(|entry| adjust(*entry, id, count, id_bits)).collect();
    CpuId::from_entries(&entries)
        .map_err(|e| Error::Vcpu { vcpu: id as u8, why: format!("processor features: {e:?}") })
}

fn adjust(mut entry: kvm_cpuid_entry2, id: u32, count: u32, id_bits: u32) -> kvm_cpuid_entry2 {
    match entry.function {
        0x1 => {
            entry.ebx = (entry.ebx & 0x0000_ffff) | (id << 24) | (count << 16);
            entry.ecx |= TSC_DEADLINE | HYPERVISOR;
            if count > 1 {
                entry.edx |= HTT;
            }
        }
        // Intel, cache parameters: cores in the package, and how many share each cache.
        0x4 => {
            entry.eax = (entry.eax & 0x0000_3fff) | (count.saturating_sub(1) << 26);
        }
        // Extended topology: level 0 is the thread (one per core), level 1 the core.
        0xb | 0x1f => {
            (entry.eax, entry.ebx, entry.ecx) = match entry.index {
                0 => (0, 1, 1 << 8),
                1 => (id_bits, count, (2 << 8) | 1),
                index => (0, 0, index & 0xff),
            };
            entry.edx = id;
        }
        // AMD: number of processors in the package, and the width of the APIC id's core part.
        0x8000_0008 => entry.ecx = (id_bits << 12) | count.saturating_sub(1),
        // AMD: extended APIC id, one thread per core, one node.
        0x8000_001e => {
            entry.eax = id;
            entry.ebx = id;
            entry.ecx = 0;
        }
        _ => {}
    }
    entry
}
