//! Virtual processors: what they look like at the first instruction, the loop that runs them on threads of their own,
//! and what is saved of them.

mod cpuid;
mod msrs;
mod prefault;
mod processor;
mod registers;
mod state;
mod vcpu;

pub use cpuid::supported as supported_features;
pub use processor::{Pausing, Processor};
pub use registers::write_tables;
pub use state::{VcpuState, saved_msrs};
pub use vcpu::{Exit, Surroundings, Vcpu};
