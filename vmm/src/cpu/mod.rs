//! Virtual processors: what they look like at the first instruction, and the loop that runs them.

mod cpuid;
mod msrs;
mod registers;
mod vcpu;

pub use registers::write_tables;
pub use vcpu::{Exit, Vcpu};
