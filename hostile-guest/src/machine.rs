//! The bare machine: memory by address, ports, page tables, interrupts, and the two ways to end.
//!
//! | address | what |
//! | --- | --- |
//! | 0x100000 up | the stack grows down from 0x300000 |
//! | 0x300000 | page directories and interrupt table of our own |
//! | 0x1000000 | this program |
//! | 0x2000000 | [`ARENA`]: rings and buffers, to the end of the smallest machine's memory |
//!
//! Every function here is sound in one sense only: there is no other program in this machine that it could harm.

use core::arch::{asm, global_asm};

pub const STACK: u64 = 0x30_0000;
const DIRECTORIES: u64 = 0x30_0000;
const INTERRUPTS: u64 = 0x31_0000;
const INTERRUPTS_POINTER: u64 = 0x31_2000;
/// Of interrupts: below the stack of what they interrupt, code may have put something without a push (the "red zone").
const INTERRUPT_STACK: u64 = 0x34_0000;
/// The monitor begins with a task state segment at 0; its field IST1 is here.
const IST1: u64 = 0x24;
/// Rings and buffers, up to the end of 64 MiB.
pub const ARENA: u64 = 0x200_0000;
pub const MEMORY: u64 = 0x400_0000;
/// First address that the monitor maps nothing at, in the smallest machine.
pub const NOWHERE: u64 = MEMORY;

/// The monitor's tables (vmm/src/layout.rs).
const PML4: u64 = 0x9000;
const PDPT: u64 = 0xa000;
const PRESENT_WRITABLE: u64 = 0b11;
const LARGE: u64 = 1 << 7;

pub const LOCAL_APIC: u64 = 0xfee0_0000;
pub const IOAPIC: u64 = 0xfec0_0000;
/// Selector of 64-bit code in the boot protocol.
const CODE: u64 = 0x10;

/// What one `mov` can move.
pub trait Word: Copy {
    /// # Safety
    /// Whatever stands at the address is the caller's.
    unsafe fn load(address: u64) -> Self;
    /// # Safety
    /// Likewise.
    unsafe fn store(address: u64, value: Self);
}

macro_rules! word {
    ($type:ty, $class:ident, $operand:literal) => {
        impl Word for $type {
            unsafe fn load(address: u64) -> Self {
                let value;
                // SAFETY: one instruction, on what the caller vouches for.
                unsafe {
                    asm!(concat!("mov ", $operand, ", [{address}]"), address = in(reg) address,
                         value = out($class) value, options(nostack, preserves_flags));
                }
                value
            }

            unsafe fn store(address: u64, value: Self) {
                // SAFETY: as above.
                unsafe {
                    asm!(concat!("mov [{address}], ", $operand), address = in(reg) address,
                         value = in($class) value, options(nostack, preserves_flags));
                }
            }
        }
    };
}

word!(u8, reg_byte, "{value}");
word!(u16, reg, "{value:x}");
word!(u32, reg, "{value:e}");
word!(u64, reg, "{value:r}");

/// A value at an address, aligned or not: memory, or a register, by one plain `mov` of its width, which KVM can emulate.
pub fn load<T: Word>(address: u64) -> T {
    // SAFETY: see the module: the machine is ours, and a page that is not mapped ends it, as it should.
    unsafe { T::load(address) }
}

pub fn store<T: Word>(address: u64, value: T) {
    // SAFETY: as above; addresses of this program itself are written by nobody.
    unsafe { T::store(address, value) }
}

pub fn fill(address: u64, len: u64, mut word: impl FnMut() -> u64) {
    for at in (address..address + len).step_by(8) {
        store(at, word());
    }
}

/// Maps what the monitor did not: the rest of the first 5 GiB, to themselves.
pub fn map_devices() {
    for gib in 1..5 {
        let directory = DIRECTORIES + gib * 0x1000;
        for entry in 0..512 {
            store(directory + entry * 8, (gib << 30) | (entry << 21) | PRESENT_WRITABLE | LARGE);
        }
        store(PDPT + gib * 8, directory | PRESENT_WRITABLE);
    }
    // SAFETY: the same tables, with more in them; this flushes what the processor remembers of them.
    unsafe { asm!("mov cr3, {}", in(reg) PML4, options(nostack)) };
}

pub fn out8(port: u16, value: u8) {
    // SAFETY: port I/O touches no memory of this program.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) };
}

pub fn out16(port: u16, value: u16) {
    // SAFETY: as above.
    unsafe { asm!("out dx, ax", in("dx") port, in("ax") value, options(nomem, nostack)) };
}

pub fn out32(port: u16, value: u32) {
    // SAFETY: as above.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nomem, nostack)) };
}

pub fn in8(port: u16) -> u8 {
    let value;
    // SAFETY: as above.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) };
    value
}

pub fn in16(port: u16) -> u16 {
    let value;
    // SAFETY: as above.
    unsafe { asm!("in ax, dx", in("dx") port, out("ax") value, options(nomem, nostack)) };
    value
}

pub fn in32(port: u16) -> u32 {
    let value;
    // SAFETY: as above.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value, options(nomem, nostack)) };
    value
}

/// `count` bytes to a port from memory, in one instruction.
pub fn out_string(port: u16, from: u64, count: u64) {
    // SAFETY: reads memory of the arena.
    unsafe {
        asm!("cld", "rep outsb", in("dx") port, inout("rsi") from => _, inout("rcx") count => _, options(nostack));
    }
}

/// `count` bytes from a port to memory, in one instruction.
pub fn in_string(port: u16, to: u64, count: u64) {
    // SAFETY: writes memory of the arena, of which no reference exists.
    unsafe {
        asm!("cld", "rep insb", in("dx") port, inout("rdi") to => _, inout("rcx") count => _, options(nostack));
    }
}

/// `count` bytes from one address to another, in one instruction: registers included.
pub fn copy_string(from: u64, to: u64, count: u64) {
    // SAFETY: as above.
    unsafe {
        asm!("cld", "rep movsb", inout("rsi") from => _, inout("rdi") to => _, inout("rcx") count => _, options(nostack));
    }
}

/// Goes on at an address, for good.
pub fn execute(address: u64) -> ! {
    // SAFETY: never returns.
    unsafe { asm!("jmp {}", in(reg) address, options(noreturn)) }
}

/// Something of no effect to KVM's paravirtual interface, or to whatever a monitor may have enabled of it.
pub fn hypercall(number: u64, argument: u64) -> u64 {
    let result;
    // SAFETY: KVM changes RAX only. The other vendor's instruction is patched by KVM, or ends this machine.
    unsafe {
        asm!("push rbx", "mov rbx, {argument}", "vmmcall", "pop rbx", argument = in(reg) argument,
             inout("rax") number => result, in("rcx") argument, in("rdx") argument, in("rsi") argument);
    }
    result
}

// Every interrupt that comes is acknowledged and forgotten.
global_asm!(
    ".globl on_interrupt",
    "on_interrupt:",
    "push rax",
    "mov eax, 0xfee000b0",
    "mov dword ptr [rax], 0",
    "pop rax",
    "iretq",
);

unsafe extern "C" {
    fn on_interrupt();
}

/// Vectors 32 and up get a handler; exceptions have none, so that the first one is a triple fault.
pub fn take_interrupts() {
    let handler = on_interrupt as *const () as u64;
    store(IST1, INTERRUPT_STACK);
    for vector in 0..256 {
        let gate =
            (handler & 0xffff) | (CODE << 16) | (1 << 32) | (0x8e << 40) | ((handler & 0xffff_0000) << 32);
        store(INTERRUPTS + vector * 16, if vector < 32 { 0 } else { gate });
        store(INTERRUPTS + vector * 16 + 8, handler >> 32);
    }
    store(INTERRUPTS_POINTER, 0x0fff_u16);
    store(INTERRUPTS_POINTER + 2, INTERRUPTS);
    // The old controllers too, with vectors of their own and no need for an end (initialization words of the 8259A): as they are
    // at first, they would raise exceptions.
    for (command, data, vector, cascade) in [(0x20, 0x21, 0x20, 4), (0xa0, 0xa1, 0x28, 2)] {
        out8(command, 0x11);
        for word in [vector, cascade, 3, 0] {
            out8(data, word);
        }
    }
    // SAFETY: the table is complete, and its handler changes nothing.
    unsafe { asm!("lidt [{}]", "sti", in(reg) INTERRUPTS_POINTER) };
    // Software enable, and a vector for spurious ones.
    store(LOCAL_APIC + 0xf0, 0x1ff_u32);
}

pub fn refuse_interrupts() {
    // SAFETY: no effect but that.
    unsafe { asm!("cli") };
}

pub fn pause() {
    core::hint::spin_loop();
}

/// By the keyboard controller, as Linux does with `reboot=k`.
pub fn reset() -> ! {
    loop {
        out8(0x64, 0xfe);
    }
}

/// An exception without a handler.
pub fn triple_fault() -> ! {
    // SAFETY: an interrupt table of no length, and an exception: the machine ends.
    unsafe {
        store(INTERRUPTS_POINTER, 0_u16);
        asm!("lidt [{}]", "ud2", in(reg) INTERRUPTS_POINTER, options(noreturn))
    }
}

/// What the compiler calls for copies and the like: there is no library that has them.
mod memory {
    use core::arch::asm;

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
        // SAFETY: the caller vouches for both ranges.
        unsafe {
            asm!("cld", "rep movsb", inout("rsi") from => _, inout("rdi") to => _, inout("rcx") count => _,
                 options(nostack));
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
        if (to as usize).wrapping_sub(from as usize) >= count {
            // SAFETY: copied upwards, no byte is overwritten before it was read.
            return unsafe { memcpy(to, from, count) };
        }
        // SAFETY: copied downwards, likewise; the caller vouches for both ranges.
        unsafe {
            asm!("std", "rep movsb", "cld", inout("rsi") from.wrapping_add(count).wrapping_sub(1) => _,
                 inout("rdi") to.wrapping_add(count).wrapping_sub(1) => _, inout("rcx") count => _, options(nostack));
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, byte: i32, count: usize) -> *mut u8 {
        // SAFETY: the caller vouches for the range.
        unsafe {
            asm!("cld", "rep stosb", in("al") byte as u8, inout("rdi") to => _, inout("rcx") count => _,
                 options(nostack));
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
        for at in 0..count {
            // SAFETY: the caller vouches for both ranges.
            let (a, b) = unsafe { (one.add(at).read_volatile(), other.add(at).read_volatile()) };
            if a != b {
                return i32::from(a) - i32::from(b);
            }
        }
        0
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
        // SAFETY: as it is there.
        unsafe { memcmp(one, other, count) }
    }
}
