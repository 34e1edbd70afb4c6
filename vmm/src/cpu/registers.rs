//! Registers and tables for the 64-bit boot protocol: long mode, flat segments, the first GiB mapped to itself, the
//! zero page's address in RSI (Documentation/arch/x86/boot.rst, "64-bit Boot Protocol").

use crate::{Error, layout, memory::Memory};
use kvm_bindings::{kvm_fpu, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Bit 1 of RFLAGS is always set.
const RFLAGS_RESERVED: u64 = 2;
/// Page table entry: present and writable; in the page directory also a 2 MiB page.
const PRESENT_WRITABLE: u64 = 0b11;
const LARGE_PAGE: u64 = 1 << 7;

/// Selectors that the boot protocol names: `__BOOT_CS` 0x10 and `__BOOT_DS` 0x18.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;
/// Descriptors at those selectors: 64-bit code, data, busy 64-bit task state; 4 GiB limits.
const GDT: [u64; 5] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff];

/// Writes GDT and page tables.
pub fn write_tables(memory: &Memory) -> Result<(), Error> {
    let put = |address: u64, value: u64| {
        memory.write_obj(value, GuestAddress(address)).map_err(|e| Error::Kernel(format!("boot tables: {e}")))
    };
    for (address, descriptor) in (layout::GDT..).step_by(8).zip(GDT) {
        put(address, descriptor)?;
    }
    put(layout::PML4, layout::PDPT | PRESENT_WRITABLE)?;
    put(layout::PDPT, layout::PD | PRESENT_WRITABLE)?;
    for (index, address) in (0..512_u64).zip((layout::PD..).step_by(8)) {
        put(address, (index << 21) | PRESENT_WRITABLE | LARGE_PAGE)?;
    }
    Ok(())
}

/// Sets the boot processor's registers. The other processors wait for the kernel's start-up interrupt as KVM made them.
pub fn set_for_boot(vcpu: &VcpuFd, entry: GuestAddress) -> Result<(), kvm_ioctls::Error> {
    vcpu.set_fpu(&kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() })?;
    vcpu.set_regs(&kvm_regs {
        rflags: RFLAGS_RESERVED,
        rip: entry.0,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        rsi: layout::ZERO_PAGE,
        ..Default::default()
    })?;

    let mut special = vcpu.get_sregs()?;
    let code = kvm_segment { selector: CODE, type_: 0xb, l: 1, ..flat() };
    let data = kvm_segment { selector: DATA, type_: 0x3, db: 1, ..flat() };
    special.cs = code;
    (special.ds, special.es, special.fs, special.gs, special.ss) = (data, data, data, data, data);
    special.tr = kvm_segment { selector: TASK, type_: 0xb, s: 0, ..flat() };
    special.gdt.base = layout::GDT;
    special.gdt.limit = (size_of_val(&GDT) - 1) as u16;
    special.idt.base = 0;
    special.idt.limit = 0;
    special.cr3 = layout::PML4;
    special.cr4 |= CR4_PAE;
    special.cr0 = CR0_PE | CR0_ET | CR0_PG;
    special.efer |= EFER_LME | EFER_LMA;
    vcpu.set_sregs(&special)
}

fn flat() -> kvm_segment {
    kvm_segment { base: 0, limit: 0xffff_ffff, present: 1, s: 1, g: 1, ..Default::default() }
}
