//! Starting a command's process: straight into its cgroup, with nothing of the agent copied (crate `bivouac-spawn`).
//!
//! Where the child fails before it has executed, it says at which step and why through memory it shares.

use crate::users::User;
use bivouac_spawn::{Place, errno, reset_signals, unblock_signals};
use std::{
    ffi::CString,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
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

/// `CAP_SYS_BOOT` of <linux/capability.h>.
const CAP_SYS_BOOT: libc::c_ulong = 22;

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
    let place = Place { cgroup: Some(plan.cgroup.as_fd()), ..Place::default() };
    // SAFETY: everything `shared` points to lives to the end of this function, and `child` makes system calls only.
    let started = unsafe { bivouac_spawn::start(&place, &mut shared, child) };
    let child = started.map_err(|error| Failure { step: Step::Fork, error })?;
    match shared.failed {
        // The child has ended by itself and is reaped like any other: nobody waits for it.
        Some((step, errno)) => Err(Failure { step, error: io::Error::from_raw_os_error(errno) }),
        None => Ok(child.pid),
    }
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

unsafe fn prepare(shared: &Shared) -> Result<(), (Step, libc::c_int)> {
    let check = |step, result: libc::c_long| if result < 0 { Err((step, errno())) } else { Ok(()) };
    // SAFETY: every pointer is to memory that `spawn` keeps alive.
    unsafe {
        reset_signals();
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
        unblock_signals();
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
