//! What stands in guest memory when the first instruction runs: the kernel, its command line, the zero page and the
//! MP table. The entry is the 64-bit boot protocol (Documentation/arch/x86/boot.rst) into an uncompressed ELF.

mod kernel;
mod mptable;
mod params;

pub use kernel::load as load_kernel;
pub use mptable::write as write_mptable;
pub use params::{command_line, write as write_params};
