//! A guest that does nothing but attack the monitor it runs on, at full speed and without Linux in between.
//!
//! The monitor boots it as it boots any kernel: an ELF, entered in long mode with the first GiB mapped to itself and the zero
//! page's address in RSI. Its orders are on the kernel command line:
//!
//! | word | meaning |
//! | --- | --- |
//! | `attack=NAME` | what to do: a name of [`attacks::ALL`] |
//! | `seed=NUMBER` | chooses among an attack's variants, and begins its random numbers: the same seed does the same |
//! | `count=NUMBER` | rounds, for attacks that have any |
//!
//! What happens then says how it went. It got through what it tried: it resets the machine by the keyboard controller, as Linux
//! does (`guest_shutdown`). A mistake of its own, or an unknown attack: a triple fault (`guest_crashed`). Any other end is
//! the monitor's doing.
//!
//! Nothing here is safe, by intent: it owns a whole machine and means to break out of it. What `unsafe` there is stands in
//! [`machine`], behind functions that name an address.

#![no_std]
#![no_main]

mod attacks;
mod driver;
mod machine;
mod orders;
mod random;

use core::{arch::global_asm, panic::PanicInfo};

// The compiler takes SSE for granted, and the processor starts without it: CR0 loses EM (bit 2) and gets MP (bit 1), CR4 gets
// OSFXSR and OSXMMEXCPT (bits 9 and 10). RSI goes on as the first argument.
global_asm!(
    ".section .text._start, \"ax\"",
    ".globl _start",
    "_start:",
    "cli",
    "mov rax, cr0",
    "and rax, -5",
    "or rax, 2",
    "mov cr0, rax",
    "mov rax, cr4",
    "or rax, 0x600",
    "mov cr4, rax",
    "mov rsp, {stack}",
    "xor ebp, ebp",
    "mov rdi, rsi",
    "call {main}",
    "ud2",
    stack = const machine::STACK,
    main = sym main,
);

extern "C" fn main(zero_page: u64) -> ! {
    machine::map_devices();
    let orders = orders::Orders::read(zero_page);
    match attacks::find(orders.attack()) {
        Some(attack) => {
            attack(&random::Random::new(orders.seed), &orders);
            machine::reset()
        }
        None => machine::triple_fault(),
    }
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    machine::triple_fault()
}
