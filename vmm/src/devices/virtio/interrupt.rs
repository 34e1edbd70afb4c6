//! A device's interrupt: the status register of section 4.2.2, and the line into the interrupt controller.

use std::{
    io,
    sync::atomic::{AtomicU32, Ordering},
};
use vmm_sys_util::eventfd::EventFd;

/// Interrupt status bit 0: the device used a buffer.
pub const USED_BUFFER: u32 = 1;

pub struct Interrupt {
    status: AtomicU32,
    /// Bits that always read as set: for a device whose rings the host's kernel drives. The kernel raises the line
    /// itself, with no register to set; a driver that finds nothing in its rings takes that as a spurious call.
    constant: u32,
    line: EventFd,
}

impl Interrupt {
    /// For a device whose rings this process drives. `line` is an irqfd.
    pub fn new(line: EventFd) -> Self {
        Self { status: AtomicU32::new(0), constant: 0, line }
    }

    /// For a device whose rings the kernel drives.
    pub fn raised_by_kernel(line: EventFd) -> Self {
        Self { status: AtomicU32::new(0), constant: USED_BUFFER, line }
    }

    /// Tells the driver that buffers were used.
    pub fn used_buffer(&self) -> io::Result<()> {
        self.status.fetch_or(USED_BUFFER, Ordering::SeqCst);
        self.line.write(1)
    }

    pub fn line(&self) -> &EventFd {
        &self.line
    }

    pub fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst) | self.constant
    }

    /// The bits that were set and not acknowledged.
    pub fn pending(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }

    pub fn restore(&self, pending: u32) {
        self.status.store(pending, Ordering::SeqCst);
    }

    pub fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::SeqCst);
    }
}
