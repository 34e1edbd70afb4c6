//! Loading the kernel.

use crate::{Error, layout, memory::Memory};
use linux_loader::loader::{KernelLoader, elf::Elf};
use std::fs::File;
use vm_memory::GuestAddress;

/// Copies the ELF's segments to where they are linked to run and returns the entry point.
pub fn load(memory: &Memory, kernel: &mut File) -> Result<GuestAddress, Error> {
    let loaded = Elf::load(memory, None, kernel, Some(GuestAddress(layout::HIGH_MEMORY)))
        .map_err(|e| Error::Kernel(format!("{e}; an uncompressed x86-64 vmlinux is needed")))?;
    Ok(loaded.kernel_load)
}
