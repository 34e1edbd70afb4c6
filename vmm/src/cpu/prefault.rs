//! Mapping guest pages before the guest touches them (`KVM_PRE_FAULT_MEMORY`, Linux 6.11).
//!
//! A page that a guest touches for the first time costs an exit; a run of them, mapped in one call, costs no exit at all.
//! Only worth it for what will be touched. A kernel or processor that cannot do it leaves the pages to be faulted in.

use kvm_bindings::{KVMIO, kvm_pre_fault_memory};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::{ioctl::ioctl_with_mut_ref, ioctl_iowr_nr};

ioctl_iowr_nr!(KVM_PRE_FAULT_MEMORY, KVMIO, 0xd5, kvm_pre_fault_memory);

/// Maps what it can of the range.
pub fn map(fd: &VcpuFd, start: u64, bytes: u64) {
    let mut range = kvm_pre_fault_memory { gpa: start, size: bytes, ..Default::default() };
    while range.size > 0 {
        let left = range.size;
        // SAFETY: the request reads and writes one structure of this type, and the descriptor is a processor's.
        let result = unsafe { ioctl_with_mut_ref(fd, KVM_PRE_FAULT_MEMORY(), &mut range) };
        let interrupted = result < 0
            && matches!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EINTR | libc::EAGAIN));
        // It counts down what it has done. A call that did nothing, and was not interrupted, will not do more.
        if !interrupted && (result < 0 || range.size >= left) {
            return;
        }
    }
}
