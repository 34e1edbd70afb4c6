//! Starting a process: straight into its cgroup, with the agent's memory until it executes, so that nothing of the
//! agent is copied (`clone3` with `CLONE_VM | CLONE_VFORK | CLONE_INTO_CGROUP`).
//!
//! The child runs on a stack of its own while this thread waits. It makes system calls and nothing else: no allocation,
//! no lock, no library call that keeps state. Where it fails, it says at which step and why through memory it shares.

use crate::users::User;
use std::{
    ffi::CString,
    fs::File,
    io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
};

/// Everything the child needs, made before it exists.
pub struct Plan<'a> {
    /// Paths to try to execute, in order: one, or one for each directory on `PATH`.
    pub candidates: Vec<CString>,
    pub argv: Vec<CString>,
    pub env: Vec<CString>,
    pub cwd: CString,
    pub user: &'a User,
    pub stdin: BorrowedFd<'a>,
    pub stdout: BorrowedFd<'a>,
    pub stderr: BorrowedFd<'a>,
    pub cgroup: &'a File,
}

/// The step that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Fork,
    Session,
    Descriptors,
    Credentials,
    Directory,
    Execute,
    /// The file is there, and what it needs to be run (interpreter, loader) is not.
    Interpreter,
}

#[derive(Debug)]
pub struct Failure {
    pub step: Step,
    pub error: io::Error,
}

/// What parent and child share.
struct Shared {
    candidates: *const *const libc::c_char,
    argv: *const *const libc::c_char,
    env: *const *const libc::c_char,
    cwd: *const libc::c_char,
    uid: u32,
    gid: u32,
    groups: *const u32,
    groups_len: usize,
    descriptors: [libc::c_int; 3],
    failed: Option<(Step, libc::c_int)>,
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

/// `CAP_SYS_BOOT` of <linux/capability.h>.
const CAP_SYS_BOOT: libc::c_ulong = 22;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// The child calls a handful of system calls; a page would do.
const STACK: usize = 32 << 10;

/// Starts the process and returns its id.
pub fn spawn(plan: &Plan) -> Result<libc::pid_t, Failure> {
    let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
    };
    let (candidates, argv, env) = (pointers(&plan.candidates), pointers(&plan.argv), pointers(&plan.env));
    let mut shared = Shared {
        candidates: candidates.as_ptr(),
        argv: argv.as_ptr(),
        env: env.as_ptr(),
        cwd: plan.cwd.as_ptr(),
        uid: plan.user.uid,
        gid: plan.user.gid,
        groups: plan.user.groups.as_ptr(),
        groups_len: plan.user.groups.len(),
        descriptors: [plan.stdin.as_raw_fd(), plan.stdout.as_raw_fd(), plan.stderr.as_raw_fd()],
        failed: None,
    };
    // 16-byte aligned, as the calling convention wants it.
    let mut stack = vec![0_u128; STACK / size_of::<u128>()];
    let args = CloneArgs {
        flags: (libc::CLONE_VM | libc::CLONE_VFORK) as u64 | CLONE_INTO_CGROUP,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr() as u64,
        stack_size: size_of_val(stack.as_slice()) as u64,
        cgroup: plan.cgroup.as_raw_fd() as u64,
        ..CloneArgs::default()
    };

    let signals = block_signals();
    // SAFETY: the child shares this memory and runs `child` on `stack`, which nothing else uses, while CLONE_VFORK
    // keeps this thread in the call until the child has executed or ended; so everything `shared` points to stays
    // alive and is touched by one side at a time. Signals are blocked, so no handler runs in the child.
    let pid = unsafe { clone3(&args, &mut shared) };
    restore_signals(&signals);
    drop(stack);

    if pid < 0 {
        return Err(Failure { step: Step::Fork, error: io::Error::from_raw_os_error((-pid) as i32) });
    }
    match shared.failed {
        // The child has ended by itself and is reaped like any other: nobody waits for it.
        Some((step, errno)) => Err(Failure { step, error: io::Error::from_raw_os_error(errno) }),
        None => Ok(pid as libc::pid_t),
    }
}

/// # Safety
/// As described at the call.
unsafe fn clone3(args: &CloneArgs, shared: &mut Shared) -> i64 {
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
            shared = in(reg) ptr::from_mut(shared),
            child = in(reg) child as *const (),
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

/// The child, from the first instruction to the last. Raw system calls throughout where the C library would act on
/// every thread of the process (credentials).
unsafe extern "C" fn child(shared: *mut Shared) -> ! {
    // SAFETY: `spawn` made everything `shared` points to, and waits.
    unsafe {
        let shared = &mut *shared;
        let (step, errno) = match prepare(shared) {
            Ok(()) => execute(shared),
            Err(failed) => failed,
        };
        shared.failed = Some((step, errno));
        libc::_exit(127)
    }
}

fn errno() -> libc::c_int {
    // SAFETY: always a valid pointer to this thread's number; the child borrows its parent's thread.
    unsafe { *libc::__errno_location() }
}

unsafe fn prepare(shared: &Shared) -> Result<(), (Step, libc::c_int)> {
    let check = |step, result: libc::c_long| if result < 0 { Err((step, errno())) } else { Ok(()) };
    // SAFETY: every pointer is to memory that `spawn` keeps alive.
    unsafe {
        // Signals: what the agent ignores or handles is the default again. Nothing is inherited but by intent.
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        for signal in 1..=64 {
            libc::sigaction(signal, &raw const default, ptr::null_mut());
        }
        check(Step::Session, libc::setsid().into())?;
        for (target, source) in (0..).zip(shared.descriptors) {
            check(Step::Descriptors, libc::dup2(source, target).into())?;
        }
        // The kernel may end a command for want of memory, never the agent.
        let score = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if score >= 0 {
            libc::write(score, c"0".as_ptr().cast(), 1);
            libc::close(score);
        }
        // Not even a root command may stop the machine: a kernel without power management would halt for good, with
        // nobody told. A sandbox is ended by deleting it.
        check(Step::Credentials, libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_BOOT).into())?;
        check(Step::Credentials, libc::syscall(libc::SYS_setgroups, shared.groups_len, shared.groups))?;
        check(Step::Credentials, libc::syscall(libc::SYS_setresgid, shared.gid, shared.gid, shared.gid))?;
        check(Step::Credentials, libc::syscall(libc::SYS_setresuid, shared.uid, shared.uid, shared.uid))?;
        check(Step::Directory, libc::chdir(shared.cwd).into())?;
        libc::umask(0o022);
        let mut none = std::mem::MaybeUninit::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut());
    }
    Ok(())
}

/// Returns only with a failure: the most telling one of all candidates.
unsafe fn execute(shared: &Shared) -> (Step, libc::c_int) {
    let mut failed = (Step::Execute, libc::ENOENT);
    // SAFETY: the list ends in a null pointer, and so do `argv` and `env`.
    unsafe {
        let mut candidate = shared.candidates;
        while !(*candidate).is_null() {
            libc::execve(*candidate, shared.argv, shared.env);
            match errno() {
                libc::ENOENT if libc::access(*candidate, libc::F_OK) == 0 => {
                    return (Step::Interpreter, libc::ENOENT);
                }
                libc::ENOENT | libc::ENOTDIR => {}
                // Goes on to the next directory, as a shell does, and is remembered.
                libc::EACCES => failed = (Step::Execute, libc::EACCES),
                other => return (Step::Execute, other),
            }
            candidate = candidate.add(1);
        }
    }
    failed
}
