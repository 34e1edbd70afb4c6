//! A virtual processor as it is saved, and the order in which KVM wants it back.

use crate::Error;
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MAX_MSR_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_debugregs,
    kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

/// `IA32_TIME_STAMP_COUNTER`.
const TSC: u32 = 0x10;
/// `IA32_TSC_DEADLINE`: compared with the counter the moment it is written, so the counter comes first.
const TSC_DEADLINE: u32 = 0x6e0;

/// Everything of one processor that KVM gives out.
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    pub cpuid: Vec<kvm_cpuid_entry2>,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: Box<kvm_xsave>,
    xcrs: kvm_xcrs,
    debug: kvm_debugregs,
    lapic: kvm_lapic_state,
    /// Index and value.
    msrs: Vec<(u32, u64)>,
    events: kvm_vcpu_events,
}

/// The registers this host's KVM can save, in the order they are to be restored in.
pub fn saved_msrs(kvm: &Kvm) -> Result<Vec<u32>, Error> {
    let list = kvm.get_msr_index_list().map_err(Error::kvm("list the model-specific registers"))?;
    let mut indexes = list.as_slice().to_vec();
    indexes.sort_unstable_by_key(|index| (*index == TSC_DEADLINE, *index != TSC, *index));
    Ok(indexes)
}

/// Reads a processor that is not running and owes KVM no completion of an exit.
pub fn save(fd: &VcpuFd, msrs: &[u32]) -> Result<VcpuState, kvm_ioctls::Error> {
    // The multiprocessing state comes first: reading it makes KVM act on start-up interrupts that wait in the APIC.
    let mp_state = fd.get_mp_state()?;
    Ok(VcpuState {
        cpuid: fd.get_cpuid2(KVM_MAX_CPUID_ENTRIES)?.as_slice().to_vec(),
        mp_state,
        regs: fd.get_regs()?,
        sregs: fd.get_sregs()?,
        // 4 KiB hold all of it: what needs more (AMX) is offered only to processes that asked for it.
        xsave: Box::new(fd.get_xsave()?),
        xcrs: fd.get_xcrs()?,
        debug: fd.get_debug_regs()?,
        lapic: fd.get_lapic()?,
        msrs: read_msrs(fd, msrs)?,
        events: fd.get_vcpu_events()?,
    })
}

/// KVM lists registers that this guest's features do not have. It stops at each of them; they are left out.
fn read_msrs(fd: &VcpuFd, indexes: &[u32]) -> Result<Vec<(u32, u64)>, kvm_ioctls::Error> {
    let mut values = Vec::with_capacity(indexes.len());
    let mut rest = indexes;
    while !rest.is_empty() {
        let (chunk, _) = rest.split_at(rest.len().min(KVM_MAX_MSR_ENTRIES));
        let wanted: Vec<_> = chunk.iter().map(|index| entry(*index, 0)).collect();
        let mut msrs = Msrs::from_entries(&wanted).map_err(|_| kvm_ioctls::Error::new(libc::E2BIG))?;
        let read = fd.get_msrs(&mut msrs)?;
        values.extend(msrs.as_slice().iter().take(read).map(|entry| (entry.index, entry.data)));
        let done = if read < chunk.len() { read + 1 } else { read };
        rest = rest.get(done..).unwrap_or_default();
    }
    Ok(values)
}

/// Writes a processor that has not run. The interrupt controller exists already.
///
/// Features come first, since what KVM takes depends on them; the APIC follows the special registers, which hold its
/// base; the counter precedes the deadline that is compared with it; events come last, since they may refer to all.
pub fn restore(fd: &VcpuFd, id: u8, state: &VcpuState) -> Result<(), Error> {
    let failed = |what: &'static str| {
        move |why: kvm_ioctls::Error| Error::Vcpu { vcpu: id, why: format!("restore {what}: {why}") }
    };
    let cpuid = CpuId::from_entries(&state.cpuid)
        .map_err(|e| Error::Vcpu { vcpu: id, why: format!("restore features: {e:?}") })?;
    fd.set_cpuid2(&cpuid).map_err(failed("features"))?;
    fd.set_mp_state(state.mp_state).map_err(failed("multiprocessing state"))?;
    fd.set_regs(&state.regs).map_err(failed("registers"))?;
    fd.set_sregs(&state.sregs).map_err(failed("special registers"))?;
    // SAFETY: the kernel reads 4 KiB, the size of the structure, as long as no dynamic feature (AMX) is enabled for
    // this process; nothing here asks for one.
    unsafe { fd.set_xsave(&state.xsave) }.map_err(failed("extended state"))?;
    fd.set_xcrs(&state.xcrs).map_err(failed("extended control registers"))?;
    fd.set_debug_regs(&state.debug).map_err(failed("debug registers"))?;
    fd.set_lapic(&state.lapic).map_err(failed("interrupt controller"))?;
    write_msrs(fd, id, &state.msrs)?;
    fd.set_vcpu_events(&state.events).map_err(failed("events"))
}

fn write_msrs(fd: &VcpuFd, id: u8, values: &[(u32, u64)]) -> Result<(), Error> {
    let failed =
        |why: String| Error::Vcpu { vcpu: id, why: format!("restore model-specific registers: {why}") };
    for chunk in values.chunks(KVM_MAX_MSR_ENTRIES) {
        let entries: Vec<_> = chunk.iter().map(|(index, data)| entry(*index, *data)).collect();
        let msrs = Msrs::from_entries(&entries).map_err(|e| failed(format!("{e:?}")))?;
        let set = fd.set_msrs(&msrs).map_err(|e| failed(e.to_string()))?;
        // A count below the number of entries is how KVM says which one it refused.
        if let Some((index, _)) = chunk.get(set) {
            return Err(failed(format!("KVM refused {index:#x}")));
        }
    }
    Ok(())
}

fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry { index, data, ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_is_restored_before_everything_and_the_deadline_after() {
        let mut indexes = vec![TSC_DEADLINE, 0x4b56_4d01, TSC, 0x174];
        indexes.sort_unstable_by_key(|index| (*index == TSC_DEADLINE, *index != TSC, *index));
        assert_eq!(indexes, [TSC, 0x174, 0x4b56_4d01, TSC_DEADLINE]);
    }
}
