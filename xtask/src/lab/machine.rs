//! The emulated machine: QEMU without acceleration, an AMD processor with SVM, the machine's files through virtiofs.
//!
//! Everything is handed over as an open descriptor and every child dies with us, so that nothing is left to clean up
//! however this program ends.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::cpu::Cpu;
use super::parts::Parts;
use super::wire;

const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// Quick to boot, and quiet: what is emulated anyway needs no mitigations, audit or address randomization.
const COMMAND_LINE: &str = "console=ttyS0 loglevel=4 panic=-1 nokaslr mitigations=off audit=0 apparmor=0 \
    nowatchdog random.trust_cpu=on cryptomgr.notests tsc=reliable no_timer_check rcupdate.rcu_expedited=1 \
    systemd.unified_cgroup_hierarchy=1";

#[derive(Debug)]
pub struct Size {
    pub cpus: u32,
    pub memory_mib: u32,
    pub disk_mib: u32,
}

#[derive(Debug)]
pub struct Machine {
    qemu: Child,
    _doors: Vec<Door>,
    _cpu: Cpu,
    /// Our end of the port that `inside` speaks on.
    pub port: UnixStream,
}

impl Machine {
    /// `messages` gets the console and QEMU's own words; `folder` is a place for large temporary files.
    pub fn start(
        parts: &Parts,
        size: &Size,
        initramfs: &[u8],
        messages: &Path,
        folder: &Path,
    ) -> Result<Self> {
        let doors = [Door::open("machine", "always", folder)?, Door::open("shared", "auto", folder)?];
        let cpu = Cpu::take(folder)?;
        let (port, far) = UnixStream::pair()?;
        let initrd = in_memory(initramfs)?;
        let disk = scratch_disk(folder, size.disk_mib)?;
        let log = File::create(messages).with_context(|| format!("cannot write {}", messages.display()))?;

        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
            .args(["-machine", "q35,memory-backend=memory", "-accel", "tcg,thread=multi"])
            .args(["-cpu", "EPYC,+svm,+npt,-rdseed,-sha-ni"])
            .args(["-smp", &size.cpus.to_string(), "-m", &format!("{}M", size.memory_mib)])
            // Shared, since the virtiofs servers read and write guest memory themselves.
            .args(["-object", &format!("memory-backend-memfd,id=memory,size={}M,share=on", size.memory_mib)])
            .arg("-kernel")
            .arg(&parts.kernel)
            .args(["-initrd", &path_of(&initrd), "-append", COMMAND_LINE])
            .args(["-chardev", &format!("file,id=console,append=on,path={}", messages.display())])
            .args(["-serial", "chardev:console"])
            .args([
                "-device",
                "virtio-serial-pci",
                "-chardev",
                &format!("socket,id=port,fd={}", far.as_raw_fd()),
            ])
            .args(["-device", &format!("virtserialport,chardev=port,name={}", wire::PORT)])
            // Thrown away with the machine, so nothing of it need ever reach the real disk.
            .args(["-drive", &format!("if=none,id=disk,format=raw,cache=unsafe,file={}", path_of(&disk))])
            .args(["-device", "virtio-blk-pci,drive=disk"]);
        for door in &doors {
            let (tag, fd) = (door.tag, door.client.as_raw_fd());
            qemu.args(["-chardev", &format!("socket,id={tag},fd={fd}")]);
            qemu.args(["-device", &format!("vhost-user-fs-pci,chardev={tag},tag={tag},queue-size=1024")]);
        }
        let mut inherited = vec![far.as_fd(), initrd.as_fd(), disk.as_fd()];
        inherited.extend(doors.iter().map(|door| door.client.as_fd()));
        let qemu =
            spawn(qemu.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log), &inherited, Some(cpu.only))
                .context("cannot start qemu-system-x86_64 (package qemu-system-x86)")?;
        Ok(Self { qemu, _doors: doors.into(), _cpu: cpu, port })
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// One virtiofs server on the machine's root, and QEMU's end of the connection to it.
///
/// Chosen over 9p (msize 512 KiB, cache=loose) by measurement, two runs of each: 58 MB read for the first time in 0.24 to
/// 0.26 s against 0.33 to 0.53, 600 files of Python's library found in 0.64 to 0.83 s against 1.21, `python3 -c 1` alike
/// (0.6 to 0.9 s, then 0.2 to 0.4). And the cloud kernel has it built in, where 9p needs a kernel three times the size.
#[derive(Debug)]
struct Door {
    tag: &'static str,
    server: Child,
    client: UnixStream,
}

impl Door {
    /// `cache`: `always` never asks the machine again, `auto` asks when a second has passed.
    fn open(tag: &'static str, cache: &str, folder: &Path) -> Result<Self> {
        let path = folder.join(format!("{tag}-{}.sock", std::process::id()));
        let _ = fs::remove_file(&path);
        let listener =
            UnixListener::bind(&path).with_context(|| format!("cannot bind {}", path.display()))?;
        let client = UnixStream::connect(&path)?;
        fs::remove_file(&path)?;
        let mut server = Command::new(VIRTIOFSD);
        server
            .arg(format!("--fd={}", listener.as_raw_fd()))
            .args(["-f", "-o", &format!("source=/,sandbox=chroot,cache={cache},log_level=err")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let server = spawn(&mut server, &[listener.as_fd()], None)
            .with_context(|| format!("cannot start {VIRTIOFSD} (package qemu-system-common)"))?;
        Ok(Self { tag, server, client })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Starts a child that keeps the given descriptors, by the same numbers, may be held to some processors, and dies when
/// this thread does.
fn spawn(command: &mut Command, inherited: &[BorrowedFd<'_>], cpus: Option<CpuSet>) -> Result<Child> {
    let kept: Vec<i32> = inherited.iter().map(AsRawFd::as_raw_fd).collect();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if let Some(cpus) = &cpus {
            sched_setaffinity(None, cpus)?;
        }
        for fd in &kept {
            // SAFETY: the caller holds these descriptors open until `spawn` has returned.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls only, and none of them allocates or locks.
    unsafe { command.pre_exec(prepare) };
    Ok(command.spawn()?)
}

/// A name by which a child that inherited the descriptor can open the file again.
fn path_of(fd: &impl AsRawFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

fn in_memory(bytes: &[u8]) -> Result<OwnedFd> {
    let mut file = File::from(memfd_create("initramfs", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file.into())
}

/// A sparse file with an XFS whose files can be cloned, without a name.
fn scratch_disk(folder: &Path, mib: u32) -> Result<File> {
    let path: PathBuf = folder.join(format!("disk-{}.img", std::process::id()));
    let disk = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    disk.set_len(u64::from(mib) << 20)?;
    let made = Command::new("mkfs.xfs").args(["-q", "-f", "-K", "-m", "reflink=1"]).arg(&path).output();
    fs::remove_file(&path)?;
    let made = made.context("cannot start mkfs.xfs (package xfsprogs)")?;
    if !made.status.success() {
        bail!("mkfs.xfs failed: {}", String::from_utf8_lossy(&made.stderr).trim());
    }
    Ok(disk)
}
