//! Starting a monitor: as the first process of a PID namespace of its own, with its descriptors and nothing else: no
//! environment, no terminal, no standard input. The rest of its jail it enters by itself.

use super::MachineError;
use bivouac_protocol::monitor::fd;
use bivouac_spawn::{Child, Place, errno, reset_signals, unblock_signals};
use rustix::io::fcntl_dupfd_cloexec;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

/// What a monitor inherits, in the order of [`fd`].
#[derive(Debug)]
pub struct Inheritance {
    pub control: OwnedFd,
    /// To boot.
    pub kernel: Option<File>,
    pub root: File,
    pub scratch: File,
    pub cgroup: File,
    pub lock: File,
    pub kvm: File,
    pub vsock: File,
    pub network: OwnedFd,
    /// To be taken up: state and memory.
    pub saved: Option<(File, File)>,
    pub log: File,
}

/// What parent and child share: descriptors and the numbers they are to have, and what went wrong.
struct Shared {
    program: *const libc::c_char,
    argv: [*const libc::c_char; 2],
    env: [*const libc::c_char; 1],
    moves: *const (libc::c_int, libc::c_int),
    moves_len: usize,
    failed: libc::c_int,
}

pub fn spawn(program: &Path, parts: Inheritance) -> Result<Child, MachineError> {
    let what = || format!("starting {}", program.display());
    let null = File::options().read(true).write(true).open("/dev/null").map_err(MachineError::io(what()))?;
    let mut wanted: Vec<(OwnedFd, i32)> = vec![
        (null.try_clone().map_err(MachineError::io(what()))?.into(), 0),
        (null.into(), 1),
        (parts.log.into(), 2),
        (parts.control, fd::CONTROL),
        (parts.root.into(), fd::ROOT),
        (parts.scratch.into(), fd::SCRATCH),
        (parts.cgroup.into(), fd::CGROUP),
        (parts.lock.into(), fd::LOCK),
        (parts.kvm.into(), fd::KVM),
        (parts.vsock.into(), fd::VSOCK),
        (parts.network, fd::NETWORK),
    ];
    wanted.extend(parts.kernel.map(|kernel| (kernel.into(), fd::KERNEL)));
    if let Some((state, memory)) = parts.saved {
        wanted.extend([(state.into(), fd::STATE), (memory.into(), fd::MEMORY)]);
    }
    // Out of the way of the numbers they are to get, so that none is overwritten before it is moved.
    let held = wanted
        .iter()
        .map(|(from, to)| Ok((fcntl_dupfd_cloexec(from.as_fd(), fd::END)?, *to)))
        .collect::<rustix::io::Result<Vec<(OwnedFd, i32)>>>()
        .map_err(MachineError::os(what()))?;
    drop(wanted);
    let moves: Vec<_> = held.iter().map(|(from, to)| (from.as_raw_fd(), *to)).collect();
    let path = CString::new(program.as_os_str().as_bytes())
        .map_err(|_| MachineError::Refused(format!("{} has a zero byte in it", program.display())))?;
    let mut shared = Shared {
        program: path.as_ptr(),
        argv: [path.as_ptr(), ptr::null()],
        env: [ptr::null()],
        moves: moves.as_ptr(),
        moves_len: moves.len(),
        failed: 0,
    };
    let place = Place { namespaces: libc::CLONE_NEWPID, ..Place::default() };
    // SAFETY: everything `shared` points to lives to the end of this function, and `child` makes system calls only.
    let child =
        unsafe { bivouac_spawn::start(&place, &mut shared, child) }.map_err(MachineError::io(what()))?;
    if shared.failed != 0 {
        super::process::reap(&child.pidfd);
        return Err(MachineError::io(what())(io::Error::from_raw_os_error(shared.failed)));
    }
    Ok(child)
}

/// The child, from the first instruction to the last.
unsafe extern "C" fn child(shared: *mut Shared) -> ! {
    // SAFETY: `spawn` made everything `shared` points to, and waits.
    unsafe {
        let shared = &mut *shared;
        reset_signals();
        libc::setsid();
        for index in 0..shared.moves_len {
            let (from, to) = *shared.moves.add(index);
            if libc::dup2(from, to) < 0 {
                shared.failed = errno();
                libc::_exit(127);
            }
        }
        libc::chdir(c"/".as_ptr());
        unblock_signals();
        libc::execve(shared.program, shared.argv.as_ptr(), shared.env.as_ptr());
        shared.failed = errno();
        libc::_exit(127)
    }
}
