//! What happens when a thread makes a system call that its filter does not have: the number is logged, and the
//! process ends. In every build.

use crate::Error;
use std::io::Write;

/// Exit code of a monitor that made a forbidden call: 128 and the signal's number, as a shell would report it.
pub const EXIT_CODE: libc::c_int = 128 + libc::SIGSYS;
/// `SYS_SECCOMP` of `include/uapi/asm-generic/siginfo.h`: the signal comes from a filter.
const SYS_SECCOMP: libc::c_int = 1;

pub fn install_handler() -> Result<(), Error> {
    vmm_sys_util::signal::register_signal_handler(libc::SIGSYS, on_violation)
        .map_err(|e| Error::Io { what: "install the handler for forbidden system calls", why: e.into() })
}

/// `struct siginfo`'s part for `SIGSYS`, from `include/uapi/asm-generic/siginfo.h`; the C library does not name it.
#[repr(C)]
struct SigsysInfo {
    signo: libc::c_int,
    errno: libc::c_int,
    code: libc::c_int,
    _padding: libc::c_int,
    _call_address: *mut libc::c_void,
    syscall: libc::c_int,
    _arch: libc::c_uint,
}

/// Calls only what may be called in a signal's handler, and what every filter allows: write and exit.
extern "C" fn on_violation(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands every handler with SA_SIGINFO a valid siginfo, laid out as above for SIGSYS.
    let info = unsafe { &*info.cast::<SigsysInfo>() };
    let mut line = [0_u8; 96];
    let mut rest = &mut line[..];
    let room = rest.len();
    if info.code == SYS_SECCOMP {
        let _ = writeln!(rest, "bivouac-vmm: forbidden system call {}: ended", info.syscall);
    } else {
        let _ = writeln!(rest, "bivouac-vmm: SIGSYS from outside: ended");
    }
    let left = rest.len();
    // SAFETY: the pointer and length are those of the bytes just written; both calls are async-signal-safe.
    unsafe {
        libc::write(2, line.as_ptr().cast(), room - left);
        libc::_exit(EXIT_CODE);
    }
}
