//! Guest memory: one anonymous mapping below the device gap, a second above 4 GiB where the machine is that large.

use crate::{Error, layout};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// The smallest and the largest machine, in MiB.
pub const MIN_MIB: u32 = 64;
pub const MAX_MIB: u32 = 65536;

/// Memory of one guest.
pub type Memory = GuestMemoryMmap<()>;

/// The regions of a machine with `mib` MiB, as (guest address, bytes).
pub fn regions(mib: u32) -> Vec<(u64, u64)> {
    let bytes = u64::from(mib) << 20;
    let low = bytes.min(layout::MMIO_GAP_START);
    let mut regions = vec![(0, low)];
    if let Some(high @ 1..) = bytes.checked_sub(low) {
        regions.push((layout::MMIO_GAP_END, high));
    }
    regions
}

/// Reserves the memory. Pages are filled with zeroes when the guest first touches them.
pub fn allocate(mib: u32) -> Result<Memory, Error> {
    let ranges = regions(mib)
        .into_iter()
        .map(|(start, len)| {
            let len = usize::try_from(len).map_err(|_| Error::Memory(format!("{mib} MiB do not fit")))?;
            Ok((GuestAddress(start), len))
        })
        .collect::<Result<Vec<_>, Error>>()?;
    Memory::from_ranges(&ranges).map_err(|e| Error::Memory(format!("{mib} MiB: {e}")))
}

/// Tells KVM which host memory stands behind which guest addresses.
pub fn register(vm: &VmFd, memory: &Memory) -> Result<(), Error> {
    for (slot, region) in memory.iter().enumerate() {
        let host = region
            .get_host_address(vm_memory::MemoryRegionAddress(0))
            .map_err(|e| Error::Memory(e.to_string()))?;
        let slot = u32::try_from(slot).map_err(|_| Error::Memory("too many regions".into()))?;
        let description = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: host as u64,
        };
        // SAFETY: the range is one live mapping that `memory` owns, and the machine keeps `memory` until its vCPUs
        // have ended; regions do not overlap and each has a slot of its own.
        unsafe { vm.set_user_memory_region(description) }
            .map_err(Error::kvm("register guest memory with KVM"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_above_three_gib_continues_above_the_device_gap() {
        assert_eq!(regions(64), vec![(0, 64 << 20)]);
        assert_eq!(regions(3072), vec![(0, 3 << 30)]);
        assert_eq!(regions(3073), vec![(0, 3 << 30), (4 << 30, 1 << 20)]);
        assert_eq!(regions(16384), vec![(0, 3 << 30), (4 << 30, 13 << 30)]);
    }
}
