//! What this machine must have: Debian packages, installed when they are missing and we are root.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::progress::Step;

/// Compiling the guest kernel.
pub const KERNEL: &[&str] = &["bc", "bison", "flex", "gcc", "libc6-dev", "libelf-dev", "make", "xz-utils"];
/// Running the lab.
pub const LAB: &[&str] = &["busybox-static", "kmod", "qemu-system-x86", "xfsprogs", "xz-utils", "zstd"];
/// Making root filesystems and disks.
pub const ROOTFS: &[&str] = &["busybox-static", "ca-certificates", "e2fsprogs", "erofs-utils", "mmdebstrap"];
/// What the daemon and the tests call on the host they run on.
pub const RUN: &[&str] = &["iproute2", "nftables"];
/// The peer that Debian has.
pub const BENCH: &[&str] = &["qemu-system-x86"];
/// Compiling the sources: the linker and the static C library.
pub const BUILD: &[&str] = &["gcc", "libc6-dev"];

/// Compiling the fuzz targets: libFuzzer is C++.
pub const FUZZ: &[&str] = &["g++"];

/// Makes sure that `packages` are installed.
///
/// Not root: fails with the one command that root must run, which covers every step of every subcommand.
pub fn need(cache: &Cache, packages: &[&str]) -> Result<()> {
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    if !is_root() {
        let mut all: Vec<&str> = [KERNEL, LAB, ROOTFS, RUN, BUILD, FUZZ].concat();
        all.sort_unstable();
        all.dedup();
        bail!(
            "these Debian packages are missing: {}\nlet root run this one command, then try again:\n\n    \
             sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends {}'\n",
            missing.join(" "),
            all.join(" ")
        );
    }
    let _lock = cache.lock("debian-packages")?;
    let step = Step::begin(cache, "install Debian packages")?;
    let install = || -> Result<()> {
        step.run(apt_get().arg("update"))?;
        step.run(apt_get().args(["install", "-y", "--no-install-recommends"]).args(&missing))
    };
    // A mirror that is just being refreshed fails once and works a moment later.
    if let Err(why) = install() {
        eprintln!("xtask: trying once more, since {why:#}");
        std::thread::sleep(std::time::Duration::from_secs(3));
        install()?;
    }
    Ok(())
}

/// Fails, unless we are root, with the one command that root must run.
pub fn need_root(why: &str) -> Result<()> {
    if is_root() {
        return Ok(());
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    bail!(
        "{why} needs root. Run this one command:\n\n    sudo env \"PATH=$PATH\" \"HOME=$HOME\" cargo xtask {}\n",
        arguments.join(" ")
    )
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// `apt-get`, asking nothing, and working in folders that its own unprivileged user cannot enter.
pub fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    command.args(["-q", "-o", "APT::Sandbox::User=root", "-o", "DPkg::Lock::Timeout=300"]);
    command
}

fn missing<'a>(packages: &[&'a str]) -> Result<Vec<&'a str>> {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f=${Package} ${db:Status-Status}\\n"])
        .args(packages)
        .stderr(Stdio::null())
        .output()
        .context("cannot start dpkg-query: bivouac is built on Debian 12 (or a system with its packages)")?;
    let known = String::from_utf8_lossy(&output.stdout).into_owned();
    let installed = |name: &str| known.lines().any(|line| line == format!("{name} installed"));
    Ok(packages.iter().copied().filter(|name| !installed(name)).collect())
}
