//! What a sandbox needs of its host besides KVM.

use super::Finding;
use rustix::fs::{Mode, OFlags};
use std::{fs, os::fd::AsFd, path::Path, process::Command};

const CGROUP: &str = "/sys/fs/cgroup";

fn opens(path: &str) -> Result<(), rustix::io::Errno> {
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map(drop)
}

pub fn vhost_vsock() -> Finding {
    let name = "vhost_vsock";
    match opens("/dev/vhost-vsock") {
        Ok(()) => Finding::good(name, true, "/dev/vhost-vsock opens: guests can be talked to"),
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV) => Finding::bad(
            name,
            true,
            "/dev/vhost-vsock is not there: nothing could talk to a guest",
            "modprobe vhost_vsock, and add it to /etc/modules-load.d/bivouac.conf",
        ),
        Err(e) => Finding::bad(name, true, format!("/dev/vhost-vsock cannot be opened: {e}"), "run as root"),
    }
}

pub fn cgroup_v2() -> Finding {
    /// `CGROUP2_SUPER_MAGIC` of <linux/magic.h>.
    const MAGIC: i64 = 0x6367_7270;
    let name = "cgroup_v2";
    match rustix::fs::statfs(CGROUP) {
        Ok(found) if found.f_type == MAGIC => Finding::good(name, true, format!("cgroup v2 is at {CGROUP}")),
        _ => Finding::bad(
            name,
            true,
            format!("{CGROUP} is not cgroup v2: sandboxes could be neither limited nor cleaned up after"),
            "boot with systemd.unified_cgroup_hierarchy=1, or mount cgroup2 there",
        ),
    }
}

pub fn cgroup_controllers() -> Finding {
    let name = "cgroup_controllers";
    let there = fs::read_to_string(format!("{CGROUP}/cgroup.controllers")).unwrap_or_default();
    let missing: Vec<_> = ["memory", "pids", "cpu"]
        .into_iter()
        .filter(|c| !there.split_whitespace().any(|t| t == *c))
        .collect();
    if missing.is_empty() {
        Finding::good(name, false, "memory, pids and cpu can be limited")
    } else {
        Finding::bad(
            name,
            false,
            format!("not available: {}; sandboxes run without these limits", missing.join(", ")),
            "do not claim these controllers for cgroup v1, and boot with cgroup_enable=memory where memory is missing",
        )
    }
}

pub fn tap() -> Finding {
    let name = "tap";
    match opens("/dev/net/tun") {
        Ok(()) => {
            Finding::good(name, false, "/dev/net/tun opens: sandboxes with an allow-list can have a network")
        }
        Err(e) => Finding::bad(
            name,
            false,
            format!("/dev/net/tun cannot be opened ({e}): no sandbox can have a network"),
            "modprobe tun, and run as root",
        ),
    }
}

pub fn nftables() -> Finding {
    let name = "nftables";
    match Command::new("nft").args(["list", "tables"]).output() {
        Ok(output) if output.status.success() => {
            Finding::good(name, false, "nft works: network policies can be enforced")
        }
        Ok(output) => Finding::bad(
            name,
            false,
            format!("nft fails: {}", String::from_utf8_lossy(&output.stderr).trim()),
            "modprobe nf_tables, and run as root",
        ),
        Err(_) => Finding::bad(
            name,
            false,
            "nft is not installed: no sandbox can have a network",
            "apt-get install nftables",
        ),
    }
}

pub fn reflinks(data: &Path) -> Finding {
    let name = "reflinks";
    // The folder itself may not be there before the daemon's first start.
    let Some(folder) = data.ancestors().find(|folder| folder.is_dir()) else {
        return Finding::bad(
            name,
            false,
            format!("{} is nowhere", data.display()),
            "give the data folder with --data-dir",
        );
    };
    match try_reflink(folder) {
        Ok(()) => Finding::good(
            name,
            false,
            format!("{} clones files: a sandbox's disk costs nothing", folder.display()),
        ),
        Err(why) => Finding::bad(
            name,
            false,
            format!("{} cannot clone files ({why}): each sandbox's disk is a sparse copy", folder.display()),
            "put the data folder on XFS (mkfs.xfs -m reflink=1) or Btrfs",
        ),
    }
}

fn try_reflink(folder: &Path) -> Result<(), rustix::io::Errno> {
    let unnamed = || {
        rustix::fs::open(folder, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
    };
    let (from, to) = (unnamed()?, unnamed()?);
    rustix::io::write(&from, &[1; 4096])?;
    rustix::fs::ioctl_ficlone(to.as_fd(), from.as_fd())
}

pub fn favordynmods() -> Finding {
    let name = "favordynmods";
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let on = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).any(|fields| {
        fields.get(1) == Some(&CGROUP) && fields.get(3).is_some_and(|o| o.contains("favordynmods"))
    });
    if on {
        Finding::good(name, false, "cgroup changes are quick (favordynmods)")
    } else {
        Finding::bad(
            name,
            false,
            "cgroup v2 is mounted without favordynmods: each new machine can wait tens of milliseconds",
            format!("mount -o remount,favordynmods {CGROUP}"),
        )
    }
}

pub fn nx_huge_pages() -> Finding {
    let name = "nx_huge_pages";
    match fs::read_to_string("/sys/module/kvm/parameters/nx_huge_pages").as_deref().map(str::trim) {
        Ok("Y" | "1" | "force") => Finding::bad(
            name,
            false,
            "KVM guards against iTLB multihit (nx_huge_pages): making a machine starts a thread, and large pages are split",
            "where /sys/devices/system/cpu/vulnerabilities/itlb_multihit says not affected, set kvm.nx_huge_pages=never",
        ),
        Ok(value) => Finding::good(name, false, format!("KVM's nx_huge_pages is {value}")),
        Err(_) => Finding::good(name, false, "KVM has no nx_huge_pages switch here"),
    }
}
