//! A thread of a monitor, held by ptrace: to look at its filter, to make it do what it would never do, to end its process
//! at a chosen system call.

use std::{io, ptr};

/// `PTRACE_SECCOMP_GET_FILTER` of `include/uapi/linux/ptrace.h`; the C library does not name it.
const SECCOMP_GET_FILTER: libc::c_uint = 0x420c;
/// `syscall`, as x86-64 spells it.
const SYSCALL: i64 = 0x050f;
/// In `orig_rax`: the thread was not in a system call.
const NONE: u64 = u64::MAX;

/// A thread that has been stopped. It goes on when this is dropped.
pub struct Traced {
    tid: i32,
}

impl Traced {
    pub fn stop(tid: i32) -> Self {
        let options = libc::PTRACE_O_TRACESYSGOOD as usize;
        ptrace(libc::PTRACE_SEIZE, tid, 0, options).unwrap_or_else(|e| panic!("seize {tid}: {e}"));
        let traced = Self { tid };
        traced.interrupt();
        traced
    }

    fn interrupt(&self) {
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0).unwrap();
        // A signal that arrived first is handed on.
        while let Some(signal) = self.wait(|status| status >> 16 == libc::PTRACE_EVENT_STOP) {
            ptrace(libc::PTRACE_CONT, self.tid, 0, signal).unwrap();
        }
    }

    /// Waits for a stop. None: it is the one that is `wanted`. Some: a signal has stopped it.
    fn wait(&self, wanted: impl Fn(i32) -> bool) -> Option<usize> {
        let mut status = 0;
        // SAFETY: the pointer is to a live integer, and nothing else is written.
        let waited = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) };
        assert_eq!(waited, self.tid, "{}", io::Error::last_os_error());
        assert!(libc::WIFSTOPPED(status), "thread {} ended: {status:#x}", self.tid);
        (!wanted(status)).then(|| usize::try_from(libc::WSTOPSIG(status)).unwrap())
    }

    fn registers(&self) -> libc::user_regs_struct {
        // SAFETY: plain numbers, for which all zeroes is a value.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        ptrace(libc::PTRACE_GETREGS, self.tid, 0, ptr::from_mut(&mut registers) as usize).unwrap();
        registers
    }

    /// The filter it entered last, an instruction a word.
    pub fn filter(&self) -> Vec<u64> {
        let length = ptrace(SECCOMP_GET_FILTER, self.tid, 0, 0).expect("it has a filter");
        let mut program = vec![0_u64; usize::try_from(length).unwrap()];
        ptrace(SECCOMP_GET_FILTER, self.tid, 0, program.as_mut_ptr() as usize).unwrap();
        program
    }

    /// Makes it go on with a system call of our choice instead of the one it waits in.
    pub fn make_call(self, number: i64, arguments: [u64; 3]) {
        let mut registers = self.registers();
        // Caught between two calls: it will wait in one soon, since all of them serve events.
        while registers.orig_rax == NONE || !self.follows_syscall(registers.rip) {
            ptrace(libc::PTRACE_CONT, self.tid, 0, 0).unwrap();
            self.interrupt();
            registers = self.registers();
        }
        registers.rip -= 2;
        registers.rax = number as u64;
        registers.orig_rax = NONE;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        ptrace(libc::PTRACE_SETREGS, self.tid, 0, ptr::from_ref(&registers) as usize).unwrap();
    }

    fn follows_syscall(&self, address: u64) -> bool {
        let at = usize::try_from(address).unwrap() - 2;
        // SAFETY: clears the error number, since any word may be the answer.
        unsafe { *libc::__errno_location() = 0 };
        // SAFETY: reads a word of the other process, and none of this one.
        let word = unsafe { libc::ptrace(libc::PTRACE_PEEKTEXT, self.tid, at, 0_usize) };
        word & 0xffff == SYSCALL
    }

    /// Lets it go on until it begins a call of this number for the `count`th time, and holds it there.
    pub fn run_until(&self, number: i64, mut count: u32) {
        let mut signal = 0;
        loop {
            ptrace(libc::PTRACE_SYSCALL, self.tid, 0, signal).unwrap();
            signal = 0;
            match self.wait(|status| libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80) {
                None => {
                    let registers = self.registers();
                    let begins = registers.rax == (-i64::from(libc::ENOSYS)) as u64;
                    if begins && registers.orig_rax == number as u64 {
                        count -= 1;
                        if count == 0 {
                            return;
                        }
                    }
                }
                // A stop of our own making is no signal.
                Some(stopped) => signal = if stopped == libc::SIGTRAP as usize { 0 } else { stopped },
            }
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = ptrace(libc::PTRACE_DETACH, self.tid, 0, 0);
    }
}

fn ptrace(request: libc::c_uint, tid: i32, address: usize, data: usize) -> io::Result<i64> {
    // SAFETY: what the callers above pass as data is a number, or the address of a live buffer of the size that the
    // request writes or reads.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
