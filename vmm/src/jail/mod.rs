//! The jail: what the monitor gives up before it looks at anything a guest or an image holds.
//!
//! The daemon starts this process as the first of a new PID namespace, with its descriptors in place ([`fd`]). As soon
//! as it knows whose machine it is, and while it still has one thread, it goes in, for good:
//!
//! 1. every descriptor it was not meant to have is closed;
//! 2. mount, network, IPC, host name and control group namespaces of its own; the root is an empty, read-only file
//!    system, so that there is no path to open;
//! 3. limits on descriptors, file size, processes, locked memory, core files;
//! 4. a user and group that nothing else on the host has, no groups, no capabilities, no way to gain any;
//! 5. system call filters: one for each kind of thread, entered as the thread starts its work ([`seccomp`]).
//!
//! What must never happen here: a step that fails and is passed over.

mod filesystem;
mod limits;
mod privileges;
pub mod seccomp;
mod violation;

use crate::Error;
use bivouac_protocol::monitor::{Jail, fd};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use std::os::fd::{AsFd, OwnedFd};

/// Enters the jail. Only the filters, which are each thread's own, are still to come.
pub fn enter(jail: &Jail, network: Option<OwnedFd>, largest_file: u64) -> Result<(), Error> {
    if jail.uid == 0 || jail.gid == 0 {
        return Err(Error::Config(
            "the monitor does not run a guest as root: uid and gid must not be 0".into(),
        ));
    }
    close_others()?;
    join_network(network)?;
    let own = UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS | UnshareFlags::NEWCGROUP;
    // SAFETY: this process has one thread, so there is none whose view of files changes under it.
    unsafe { unshare_unsafe(own) }.map_err(Error::io("make the jail's namespaces"))?;
    filesystem::empty_root()?;
    limits::set(largest_file)?;
    privileges::drop_all(jail)?;
    violation::install_handler()
}

/// What the daemon's other machines have open must not be reachable from here, whatever a caller forgot to close.
fn close_others() -> Result<(), Error> {
    // SAFETY: nothing in this process owns a descriptor above the inherited ones yet: it has opened none.
    let result = unsafe { libc::close_range(fd::END as u32, u32::MAX, 0) };
    if result < 0 {
        return Err(Error::Io { what: "close descriptors", why: std::io::Error::last_os_error() });
    }
    Ok(())
}

/// Moves into the given network namespace, or into a new one with nothing in it.
fn join_network(network: Option<OwnedFd>) -> Result<(), Error> {
    match network {
        Some(namespace) => move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(Error::io("enter the network namespace")),
        // SAFETY: as in `enter`.
        None => unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
            .map_err(Error::io("make an empty network namespace")),
    }
}
