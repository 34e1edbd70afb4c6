//! Who the monitor is: a user of its own, with nothing that root has and no way back.

use crate::Error;
use bivouac_protocol::monitor::Jail;
use rustix::{
    process::{DumpableBehavior, set_dumpable_behavior},
    thread::{
        CapabilitySet, CapabilitySets, remove_capability_from_bounding_set, set_capabilities,
        set_no_new_privs,
    },
};
use std::io;

pub fn drop_all(jail: &Jail) -> Result<(), Error> {
    let failed = Error::io::<rustix::io::Errno>;
    // Raised before the identity goes, while it is still allowed.
    for capability in CapabilitySet::all().iter() {
        match remove_capability_from_bounding_set(capability) {
            // One that this kernel does not know yet.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(e) => return Err(failed("give up capabilities")(e)),
        }
    }
    become_user(jail)?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, none).map_err(failed("give up capabilities"))?;
    set_no_new_privs(true).map_err(failed("give up new privileges"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("keep memory from being dumped"))
}

/// The C library's calls rather than bare ones: they change every thread, should there ever be more than one.
fn become_user(jail: &Jail) -> Result<(), Error> {
    let check = |result: libc::c_int, what: &'static str| {
        if result == 0 { Ok(()) } else { Err(Error::Io { what, why: io::Error::last_os_error() }) }
    };
    // SAFETY: an empty list, whose pointer is not read; the other two take numbers.
    unsafe {
        check(libc::setgroups(0, std::ptr::null()), "leave all groups")?;
        check(libc::setresgid(jail.gid, jail.gid, jail.gid), "become the sandbox's group")?;
        check(libc::setresuid(jail.uid, jail.uid, jail.uid), "become the sandbox's user")
    }
}
