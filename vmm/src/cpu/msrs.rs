//! Model-specific registers at the first instruction.

use crate::Error;
use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

/// `IA32_MISC_ENABLE`, with fast string operations on (bit 0), as firmware leaves it.
const IA32_MISC_ENABLE: u32 = 0x1a0;
/// `IA32_MTRR_DEF_TYPE`: memory types on (bit 11), write-back by default (6). Without it Linux takes all memory to be
/// uncached.
const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;

pub fn set_for_boot(vcpu: &VcpuFd, id: u8) -> Result<(), Error> {
    let failed = |why: String| Error::Vcpu { vcpu: id, why: format!("model-specific registers: {why}") };
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let wanted = [entry(IA32_MISC_ENABLE, 1), entry(IA32_MTRR_DEF_TYPE, (1 << 11) | 6)];
    let msrs = Msrs::from_entries(&wanted).map_err(|e| failed(format!("{e:?}")))?;
    let set = vcpu.set_msrs(&msrs).map_err(|e| failed(e.to_string()))?;
    match wanted.get(set) {
        None => Ok(()),
        Some(refused) => Err(failed(format!("KVM refused {:#x}", refused.index))),
    }
}
