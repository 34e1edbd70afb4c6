//! The file systems a Linux userland expects, on a root that is the template's image underneath and the sandbox's own
//! disk on top.

use super::Error;
use rustix::{
    fs::{Mode, symlink},
    io::Errno,
    mount::{MountFlags, mount, mount_move},
    process::{chdir, chroot},
};
use std::{fs, path::Path};

/// The sandbox's own disk: the second block device.
const SCRATCH_DEVICE: &str = "/dev/vdb";
/// Directories that every image holds for this.
const SCRATCH: &str = "/.bivouac/scratch";
const ROOT: &str = "/.bivouac/root";

struct Mount {
    source: &'static str,
    target: &'static str,
    kind: &'static str,
    flags: MountFlags,
    data: &'static str,
}

const fn mount_of(
    source: &'static str,
    target: &'static str,
    kind: &'static str,
    flags: MountFlags,
    data: &'static str,
) -> Mount {
    Mount { source, target, kind, flags, data }
}

const SAFE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
const TEMPORARY: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);

/// In this order, inside the new root.
const MOUNTS: [Mount; 9] = [
    mount_of("proc", "/proc", "proc", SAFE, ""),
    mount_of("sysfs", "/sys", "sysfs", SAFE, ""),
    mount_of("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, "mode=0755"),
    mount_of(
        "devpts",
        "/dev/pts",
        "devpts",
        MountFlags::NOSUID.union(MountFlags::NOEXEC),
        "ptmxmode=0666,mode=0620,gid=5",
    ),
    mount_of("tmpfs", "/dev/shm", "tmpfs", TEMPORARY, "mode=1777"),
    mount_of("mqueue", "/dev/mqueue", "mqueue", SAFE, ""),
    mount_of("tmpfs", "/run", "tmpfs", TEMPORARY, "mode=0755"),
    mount_of("tmpfs", "/tmp", "tmpfs", TEMPORARY, "mode=1777"),
    // `pids_localevents`: a refused fork counts in the cgroup it was tried in, whichever cgroup's limit it was, so that
    // each command is told of its own refusals and of no other's (Linux 6.11).
    mount_of(
        "cgroup2",
        "/sys/fs/cgroup",
        "cgroup2",
        SAFE,
        "nsdelegate,memory_recursiveprot,pids_localevents",
    ),
];

/// Links that devtmpfs does not make and shells rely on.
const DEV_LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

pub fn mount_all() -> Result<(), Error> {
    // The kernel may have mounted it on its own (CONFIG_DEVTMPFS_MOUNT), and then says so.
    match mount("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, None) {
        Ok(()) | Err(Errno::BUSY) => {}
        Err(e) => return Err(Error::io("mount devtmpfs on /dev")(e)),
    }
    enter_overlay()?;
    for Mount { source, target, kind, flags, data } in MOUNTS {
        make_directory(target)?;
        let data = std::ffi::CString::new(data).unwrap_or_default();
        match mount(source, target, kind, flags, Some(data.as_c_str())) {
            Ok(()) | Err(Errno::BUSY) => {}
            // A kernel built without it (message queues, say) is no reason to give up the rest.
            Err(Errno::NODEV) => {}
            Err(e) => return Err(Error::io(&format!("mount {kind} on {target}"))(e)),
        }
    }
    for (to, link) in DEV_LINKS {
        match symlink(to, link) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(Error::io(&format!("link {link}"))(e)),
        }
    }
    Ok(())
}

/// Joins image and disk and makes the result the root.
fn enter_overlay() -> Result<(), Error> {
    // `noinit_itable`: what was never written reads as zeroes, so no thread has to write them.
    mount(SCRATCH_DEVICE, SCRATCH, "ext4", MountFlags::NOATIME, Some(c"noinit_itable"))
        .map_err(Error::io(&format!("mount {SCRATCH_DEVICE} on {SCRATCH}")))?;
    for directory in ["upper", "work"] {
        make_directory(&format!("{SCRATCH}/{directory}"))?;
    }
    let layers = format!("lowerdir=/,upperdir={SCRATCH}/upper,workdir={SCRATCH}/work");
    let layers = std::ffi::CString::new(layers).unwrap_or_default();
    mount("overlay", ROOT, "overlay", MountFlags::NOATIME, Some(layers.as_c_str()))
        .map_err(Error::io("mount the overlay of image and disk"))?;
    chdir(ROOT).map_err(Error::io("enter the new root"))?;
    mount_move(".", "/").map_err(Error::io("move the new root into place"))?;
    chroot(".").map_err(Error::io("change root"))?;
    chdir("/").map_err(Error::io("enter /"))
}

fn make_directory(path: &str) -> Result<(), Error> {
    match rustix::fs::mkdir(path, Mode::from_raw_mode(0o755)) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) if Path::new(path).is_dir() => Ok(()),
        // A missing parent, or a file in the way: whatever the image holds, these directories have to be there.
        Err(_) => {
            let _ = fs::remove_file(path);
            fs::create_dir_all(path).map_err(Error::io(&format!("make {path}")))
        }
    }
}
