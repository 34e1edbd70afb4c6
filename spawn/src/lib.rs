//! Starting a process without copying the one that starts it: `clone3` with `CLONE_VM | CLONE_VFORK`, straight into a
//! cgroup or into namespaces of its own.
//!
//! The child runs on a stack of its own while the thread that started it waits. It makes system calls and nothing else:
//! no allocation, no lock, no library call that keeps state. Where it fails, it says so through memory it shares.
//!
//! The agent starts commands this way and the daemon its monitors: what `std::process` offers would fork either, since
//! both need steps between the two calls, and a fork copies page tables that are thrown away at once.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
};

/// The child calls a handful of system calls; a page would do.
const STACK: usize = 32 << 10;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Where the child comes to be.
#[derive(Debug, Default)]
pub struct Place<'a> {
    /// `CLONE_NEW*`: namespaces made for it.
    pub namespaces: libc::c_int,
    /// The folder of a cgroup v2 to start in.
    pub cgroup: Option<BorrowedFd<'a>>,
}

#[derive(Debug)]
pub struct Child {
    pub pid: libc::pid_t,
    /// Close-on-exec.
    pub pidfd: OwnedFd,
}

/// `struct clone_args` of <linux/sched.h>.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Runs `child` with `shared` in a new process and returns once that has executed another program or ended.
///
/// Whether it got as far as its program, it says in `shared`. Either way it is this process's child, and is reaped like
/// any other.
///
/// # Safety
/// `child` may make system calls, and touch what `shared` leads to, which has to stay valid until this returns; nothing
/// else. It begins with all signals blocked and the caller's handlers in place: see [`reset_signals`].
pub unsafe fn start<T>(
    place: &Place<'_>,
    shared: &mut T,
    child: unsafe extern "C" fn(*mut T) -> !,
) -> io::Result<Child> {
    // 16-byte aligned, as the calling convention wants it.
    let mut stack = vec![0_u128; STACK / size_of::<u128>()];
    let mut pidfd: libc::c_int = -1;
    let mut args = CloneArgs {
        flags: (libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | place.namespaces) as u64,
        pidfd: ptr::from_mut(&mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr() as u64,
        stack_size: size_of_val(stack.as_slice()) as u64,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = place.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }

    let signals = block_signals();
    // SAFETY: the child shares this memory and runs on `stack`, which nothing else uses, while CLONE_VFORK keeps this
    // thread in the call until the child has executed or ended; so everything it can reach stays alive and is touched
    // by one side at a time. Signals are blocked, so no handler runs in the child.
    let pid = unsafe { clone3(&args, ptr::from_mut(shared).cast(), child as *const ()) };
    restore_signals(&signals);
    drop(stack);
    if pid < 0 {
        return Err(io::Error::from_raw_os_error((-pid) as i32));
    }
    // SAFETY: the kernel has just made it, for this caller.
    Ok(Child { pid: pid as libc::pid_t, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
}

/// # Safety
/// As described at the call.
unsafe fn clone3(args: &CloneArgs, shared: *mut libc::c_void, child: *const ()) -> i64 {
    let result: i64;
    // SAFETY: in the parent this is one system call. The child comes out of it on its own stack with the same registers,
    // calls `child` with `shared`, and never returns from it.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, {shared}",
            "call {child}",
            "ud2",
            "2:",
            shared = in(reg) shared,
            child = in(reg) child,
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") ptr::from_ref(args),
            in("rsi") size_of::<CloneArgs>(),
            // Not `lateout`: the kernel overwrites them before the child has read its inputs.
            out("rcx") _,
            out("r11") _,
        );
    }
    result
}

/// All signals blocked; what was blocked before.
fn block_signals() -> libc::sigset_t {
    let mut before = std::mem::MaybeUninit::uninit();
    let mut all = std::mem::MaybeUninit::uninit();
    // SAFETY: both are filled in by the calls before they are read.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: a set that `sigprocmask` filled in.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, before, ptr::null_mut()) };
}

/// For the child: what the starter ignores or handles is the default again. [`unblock_signals`] comes when the rest is
/// done.
pub fn reset_signals() {
    // SAFETY: plain data, for which zeroes are valid; the calls only read it.
    unsafe {
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        for signal in 1..=64 {
            libc::sigaction(signal, &raw const default, ptr::null_mut());
        }
    }
}

/// For the child, as its last step before it executes.
pub fn unblock_signals() {
    let mut none = std::mem::MaybeUninit::uninit();
    // SAFETY: filled in by the first call before the second reads it.
    unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut());
    }
}

/// For the child: why its last system call failed.
pub fn errno() -> libc::c_int {
    // SAFETY: always a valid pointer to this thread's number; the child borrows its starter's thread.
    unsafe { *libc::__errno_location() }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Shared {
        said: u32,
    }

    unsafe extern "C" fn says(shared: *mut Shared) -> ! {
        // SAFETY: `start` waits while this runs.
        unsafe {
            (*shared).said = 7;
            libc::_exit(3)
        }
    }

    #[test]
    fn a_child_shares_memory_with_its_starter_and_is_reaped_like_any_other() {
        let mut shared = Shared { said: 0 };
        // SAFETY: `says` writes one number and exits.
        let child = unsafe { start(&Place::default(), &mut shared, says) }.unwrap();
        assert_eq!(shared.said, 7);
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        assert_eq!(unsafe { libc::waitpid(child.pid, &raw mut status, 0) }, child.pid);
        assert_eq!(libc::WEXITSTATUS(status), 3);
    }

    #[test]
    fn what_the_kernel_refuses_is_an_error() {
        let mut shared = Shared { said: 0 };
        let null = std::fs::File::open("/dev/null").unwrap();
        let place = Place { cgroup: Some(std::os::fd::AsFd::as_fd(&null)), ..Place::default() };
        // SAFETY: as above.
        assert!(unsafe { start(&place, &mut shared, says) }.is_err());
        assert_eq!(shared.said, 0);
    }
}
