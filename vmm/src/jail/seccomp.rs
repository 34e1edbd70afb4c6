//! System calls, by thread. What is not listed here ends the process ([`super::violation`]).
//!
//! A thread enters its filter as its first act. The lists are what the code of that thread does after that, and are
//! kept short: a call is added with its reason. Arguments are checked where one call can do much: `ioctl` by request,
//! `mmap` and `mprotect` never executable.

use crate::Error;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};
use std::collections::BTreeMap;

/// The kinds of threads there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// Talks to the daemon; pauses, saves and ends the machine.
    Control,
    /// Serves the devices' queues.
    Devices,
    /// Runs a virtual processor.
    Vcpu,
}

/// What the language's runtime and the allocator do in any thread.
const RUNTIME: &[i64] = &[
    libc::SYS_read,  // eventfds
    libc::SYS_write, // eventfds, the log
    libc::SYS_close,
    libc::SYS_futex, // locks, channels
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,           // the allocator's trim; a thread's stack as it ends
    libc::SYS_sched_getaffinity, // the allocator asks for the number of processors
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime, // where the vDSO cannot answer
    libc::SYS_clock_nanosleep,
    libc::SYS_restart_syscall, // the kernel's own, after a stop and continue
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sigaltstack, // a thread as it ends
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

const CONTROL: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_accept4, // a daemon that restarted connects again
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_fcntl,
    libc::SYS_statx,    // a snapshot's files have to be empty
    libc::SYS_pwrite64, // writing a snapshot
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_tgkill, // interrupting a virtual processor
];

const DEVICES: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_preadv,  // block
    libc::SYS_pwritev, // block
    libc::SYS_readv,   // net
    libc::SYS_writev,  // net
    libc::SYS_fdatasync,
    libc::SYS_getrandom, // entropy
];

const VCPU: &[i64] = &[];

/// Requests of `include/uapi/linux/kvm.h` and `vhost.h` on x86-64.
mod request {
    pub const KVM_RUN: u64 = 0xae80;
    pub const KVM_GET_IRQCHIP: u64 = 0xc208_ae62;
    pub const KVM_GET_PIT2: u64 = 0x8070_ae9f;
    pub const KVM_GET_CLOCK: u64 = 0x8030_ae7c;
    /// Saving a virtual processor.
    pub const KVM_GET_VCPU: &[u64] = &[
        0xc008_ae91, // KVM_GET_CPUID2
        0x8004_ae98, // KVM_GET_MP_STATE
        0x8090_ae81, // KVM_GET_REGS
        0x8138_ae83, // KVM_GET_SREGS
        0x9000_aea4, // KVM_GET_XSAVE
        0x8188_aea6, // KVM_GET_XCRS
        0x8080_aea1, // KVM_GET_DEBUGREGS
        0x8400_ae8e, // KVM_GET_LAPIC
        0xc008_ae88, // KVM_GET_MSRS
        0x8040_ae9f, // KVM_GET_VCPU_EVENTS
    ];
    /// Handing the socket device's rings to the kernel and taking them back.
    pub const VHOST: &[u64] = &[
        0x4008_af00, // VHOST_SET_FEATURES
        0x4008_af03, // VHOST_SET_MEM_TABLE
        0x4008_af10, // VHOST_SET_VRING_NUM
        0x4028_af11, // VHOST_SET_VRING_ADDR
        0x4008_af12, // VHOST_SET_VRING_BASE
        0xc008_af12, // VHOST_GET_VRING_BASE
        0x4008_af20, // VHOST_SET_VRING_KICK
        0x4008_af21, // VHOST_SET_VRING_CALL
        0x4004_af61, // VHOST_VSOCK_SET_RUNNING
    ];
    /// Of `if_tun.h`: the offloads that the network card's driver negotiated.
    pub const TUNSETOFFLOAD: u64 = 0x4004_54d0;
}

fn ioctls(thread: Thread) -> Vec<u64> {
    match thread {
        // Sleep and wake of the socket device, and the machine's own state.
        Thread::Control => {
            [&[request::KVM_GET_IRQCHIP, request::KVM_GET_PIT2, request::KVM_GET_CLOCK], request::VHOST]
                .concat()
        }
        Thread::Devices => Vec::new(),
        // A driver's write to the status register activates the socket device, or the network card.
        Thread::Vcpu => {
            [&[request::KVM_RUN, request::TUNSETOFFLOAD], request::KVM_GET_VCPU, request::VHOST].concat()
        }
    }
}

/// Puts the calling thread behind its filter, for good.
pub fn enter(thread: Thread) -> Result<(), Error> {
    let failed = |why: String| Error::Jail(format!("system call filter of the {thread:?} thread: {why}"));
    let program = program(thread).map_err(|e| failed(e.to_string()))?;
    apply_filter(&program).map_err(|e| failed(e.to_string()))
}

fn program(thread: Thread) -> Result<BpfProgram, seccompiler::BackendError> {
    let own = match thread {
        Thread::Control => CONTROL,
        Thread::Devices => DEVICES,
        Thread::Vcpu => VCPU,
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        RUNTIME.iter().chain(own).map(|call| (*call, Vec::new())).collect();
    let requests = ioctls(thread);
    if !requests.is_empty() {
        let rule = |request: u64| argument(1, SeccompCmpOp::Eq, request);
        rules.insert(libc::SYS_ioctl, requests.into_iter().map(rule).collect::<Result<_, _>>()?);
    }
    if cfg!(debug_assertions) {
        // Builds for tests look whether a descriptor is open before they close it.
        let look = argument(1, SeccompCmpOp::Eq, libc::F_GETFD as u64)?;
        rules.entry(libc::SYS_fcntl).or_insert_with(|| vec![look]);
    }
    let executable = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    rules.insert(libc::SYS_mmap, vec![argument(2, executable.clone(), 0)?]);
    rules.insert(libc::SYS_mprotect, vec![argument(2, executable, 0)?]);
    SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, TargetArch::x86_64)?.try_into()
}

/// A rule on the low half of one argument.
fn argument(index: u8, op: SeccompCmpOp, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(index, SeccompCmpArgLen::Dword, op, value)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_filter_compiles_and_stays_short() {
        for thread in [Thread::Control, Thread::Devices, Thread::Vcpu] {
            let program = program(thread).unwrap();
            assert!(program.len() < 512, "{thread:?}: {} instructions", program.len());
        }
    }

    #[test]
    fn no_thread_can_open_connect_or_execute_anything() {
        for forbidden in [
            libc::SYS_open,
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_fork,
            libc::SYS_mount,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_setuid,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_keyctl,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_kill,
            libc::SYS_prctl,
        ] {
            for list in [RUNTIME, CONTROL, DEVICES, VCPU] {
                assert!(!list.contains(&forbidden), "call {forbidden}");
            }
        }
    }
}
