//! The host kernel's half of the device, on a descriptor that was opened elsewhere: crate `vhost` knows how to open it
//! by its path only, and in the jail there are no paths.

use crate::memory::Memory;
use std::{
    fs::File,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};
use vhost::{
    Error, Result,
    vhost_kern::{
        VhostKernBackend,
        vhost_binding::{VHOST_VSOCK_SET_GUEST_CID, VHOST_VSOCK_SET_RUNNING},
    },
    vsock::VhostVsock,
};
use vmm_sys_util::ioctl::ioctl_with_ref;

pub struct Kernel {
    device: File,
    memory: Arc<Memory>,
}

impl Kernel {
    pub fn new(device: File, memory: &Memory) -> Self {
        Self { device, memory: Arc::new(memory.clone()) }
    }

    fn set_running(&self, running: bool) -> Result<()> {
        let on = libc::c_int::from(running);
        // SAFETY: the request reads one int through the pointer, and the descriptor is the device's.
        check(unsafe { ioctl_with_ref(&self.device, VHOST_VSOCK_SET_RUNNING(), &on) })
    }
}

fn check(result: libc::c_int) -> Result<()> {
    if result < 0 { Err(Error::IoctlError(std::io::Error::last_os_error())) } else { Ok(()) }
}

impl VhostVsock for Kernel {
    fn set_guest_cid(&self, cid: u64) -> Result<()> {
        // SAFETY: the request reads one u64 through the pointer, and the descriptor is the device's.
        check(unsafe { ioctl_with_ref(&self.device, VHOST_VSOCK_SET_GUEST_CID(), &cid) })
    }

    fn start(&self) -> Result<()> {
        self.set_running(true)
    }

    fn stop(&self) -> Result<()> {
        self.set_running(false)
    }
}

impl VhostKernBackend for Kernel {
    type AS = Arc<Memory>;

    fn mem(&self) -> &Self::AS {
        &self.memory
    }
}

impl AsRawFd for Kernel {
    fn as_raw_fd(&self) -> RawFd {
        self.device.as_raw_fd()
    }
}
