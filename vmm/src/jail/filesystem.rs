//! The jail's root: an empty, read-only file system of its own. Everything the monitor works on it was given open.

use crate::Error;
use rustix::{
    fs::CWD,
    mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, unmount},
    process::{chdir, pivot_root},
};

/// Where the new root is mounted for a moment, before it is the root: a folder that every Linux has.
const STEP: &str = "/dev";

/// To be called in a mount namespace of this process's own.
pub fn empty_root() -> Result<(), Error> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(Error::io("keep the jail's mounts from the host"))?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("none", STEP, "tmpfs", flags, Some(c"size=4k,nr_inodes=2,mode=555"))
        .map_err(Error::io("mount the jail's root"))?;
    chdir(STEP).map_err(Error::io("enter the jail's root"))?;
    // The old root is stacked on the new one, and taken away from there with everything mounted below it.
    pivot_root(".", ".").map_err(Error::io("change to the jail's root"))?;
    unmount(".", UnmountFlags::DETACH).map_err(Error::io("take the host's files away"))?;
    chdir("/").map_err(Error::io("enter the jail's root"))?;
    debug_assert!(
        rustix::fs::openat(CWD, "proc", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).is_err()
    );
    Ok(())
}
