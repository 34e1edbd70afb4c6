//! Where things are in guest physical memory. One static table: with no hotplug there is nothing to allocate.

/// Real-mode GDT for the first instructions; the kernel replaces it.
pub const GDT: u64 = 0x500;
/// `struct boot_params`, the "zero page" (Documentation/arch/x86/zero-page.rst).
pub const ZERO_PAGE: u64 = 0x7000;
/// Stack pointer at entry. The kernel sets its own before it uses one.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Page tables for the first instructions: identity map of the first GiB.
pub const PML4: u64 = 0x9000;
pub const PDPT: u64 = 0xa000;
pub const PD: u64 = 0xb000;
/// Kernel command line, NUL-terminated, at most [`CMDLINE_MAX`] bytes (`COMMAND_LINE_SIZE` on x86).
pub const CMDLINE: u64 = 0x20000;
pub const CMDLINE_MAX: usize = 2048;
/// Top of conventional memory. The MP table stands in the last KiB below 640 KiB, one of the places that
/// arch/x86/kernel/mpparse.c looks at.
pub const MPTABLE: u64 = 0x9_fc00;
pub const MPTABLE_MAX: usize = 0x400;
/// The kernel is linked to run from here.
pub const HIGH_MEMORY: u64 = 0x10_0000;

/// Guest memory ends here at the latest, and goes on at [`MMIO_GAP_END`]: devices, the IO-APIC and the local APIC live
/// in between.
pub const MMIO_GAP_START: u64 = 0xc000_0000;
pub const MMIO_GAP_END: u64 = 0x1_0000_0000;

/// First virtio-mmio device; each takes one page and one interrupt.
pub const VIRTIO_MMIO_BASE: u64 = 0xd000_0000;
pub const VIRTIO_MMIO_SIZE: u64 = 0x1000;
/// Interrupt of the first virtio device. 5 and up are free on a PC without an ISA bus.
pub const VIRTIO_IRQ_BASE: u32 = 5;

pub const IOAPIC: u32 = 0xfec0_0000;
pub const LOCAL_APIC: u32 = 0xfee0_0000;

/// Three pages that KVM on Intel wants below 4 GiB, outside memory and devices.
pub const KVM_TSS: usize = 0xfffb_d000;
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;

pub const SERIAL_PORT: u16 = 0x3f8;
pub const SERIAL_IRQ: u32 = 4;
/// Keyboard controller: the kernel's `reboot=k` writes here.
pub const I8042_DATA: u16 = 0x60;
pub const I8042_COMMAND: u16 = 0x64;
