//! A thread that has been taken over, and makes a call that its work does not need.

use crate::{
    process,
    trace::Traced,
    world::{SMALL, World},
};

const TIOCSTI: u64 = 0x5412;
const KVM_GET_CLOCK: u64 = 0x8030_ae7c;

/// Kind of thread, call, its first arguments. Some are allowed to another kind, or with other arguments.
const FORBIDDEN: [(&str, i64, [u64; 3]); 11] = [
    ("control", libc::SYS_socket, [libc::AF_UNIX as u64, libc::SOCK_STREAM as u64, 0]),
    ("control", libc::SYS_preadv, [0; 3]),
    ("control", libc::SYS_mmap, [0, 4096, (libc::PROT_READ | libc::PROT_EXEC) as u64]),
    ("control", libc::SYS_ioctl, [0, TIOCSTI, 0]),
    ("devices", libc::SYS_openat, [0; 3]),
    ("devices", libc::SYS_sendto, [0; 3]),
    ("devices", libc::SYS_ioctl, [0, KVM_GET_CLOCK, 0]),
    ("vcpu", libc::SYS_execve, [0; 3]),
    ("vcpu", libc::SYS_pwritev, [0; 3]),
    ("vcpu", libc::SYS_epoll_ctl, [0; 3]),
    ("vcpu", libc::SYS_ioctl, [0, KVM_GET_CLOCK, 0]),
];

#[test]
fn a_forbidden_call_ends_the_machine_and_its_number_is_logged() {
    let world = World::new();
    let folder = world.boot(SMALL).save("saved");
    for (kind, call, arguments) in FORBIDDEN {
        let mut guest = world.clone_of(&folder, SMALL);
        let thread = process::thread(guest.pid(), kind);
        Traced::stop(thread.tid).make_call(call, arguments);
        let reason = guest.ended();
        assert_eq!(reason.code, "jail_violation", "{kind}, call {call}: {reason:?}\n{}", guest.log());
        let wanted = format!("forbidden system call {call}:");
        assert!(guest.log().contains(&wanted), "{kind}: {}", guest.log());
    }
}
