//! The lab: a bare-metal host with KVM, emulated, for machines whose own KVM cannot run a Linux guest.
//!
//! `cargo xtask lab -- COMMAND` runs a command in it as if here: same files, same folder, streams and exit status
//! passed through. Slow (20 to 50 times), but its KVM, vhost-vsock, tap, nftables, control groups and reflinks are those
//! of a stock Debian kernel.
//!
//! What the command changes outside the shared folders (checkout, cache, target folder, `--share`) is forgotten.

mod cpu;
mod initramfs;
pub mod inside;
mod machine;
mod parts;
mod terminal;
mod wire;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use clap::Args;

use self::machine::{Machine, Size};
use self::terminal::Raw;
use self::wire::{CHUNK, Job, Kind};
use crate::cache::Cache;
use crate::{host, repository};

/// Shown below the help of the subcommand.
pub const AFTER: &str = "\
The command finds this machine's files at the same paths and starts in the same folder; its streams and exit status are
passed through, and a person at a terminal gets a terminal. What it changes is forgotten, except in the checkout, the
cache, the target folder and what --share names. Inside are /dev/kvm, /dev/vhost-vsock, /dev/net/tun, cgroup v2, and an
XFS with reflinks at /var/lib/bivouac. No network beyond itself.

Exit status: the command's; 124 after --timeout; 125 if the lab itself stalled, which says nothing of the command.

Examples:
  cargo xtask lab -- bash
  cargo xtask lab -- target/bivouac/bin/bivouac doctor
  cargo xtask lab --timeout 300 --env RUST_LOG=debug -- sh -c 'dmesg | tail'";

/// The lab gave no sign of life: says nothing about the command.
pub const STALLED: u8 = 125;
/// The command ran longer than it was given, as with timeout(1).
pub const TIMED_OUT: u8 = 124;

/// Silence after which a lab counts as stalled. A working one speaks every second.
const SILENCE: Duration = Duration::from_secs(60);

const CPUS: u32 = 1;
const MEMORY_MIB: u32 = 6144;
const DISK_MIB: u32 = 16384;

/// Always passed on, if set.
const ENVIRONMENT: &[&str] = &["HOME", "LANG", "PATH", "RUST_BACKTRACE", "TERM", "USER"];

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Emulated processors. They take turns on one of this machine's, so more are no faster
    #[arg(long, default_value_t = CPUS)]
    pub cpus: u32,
    /// Memory; only what is touched is taken from this machine
    #[arg(long, default_value_t = MEMORY_MIB)]
    pub memory_mib: u32,
    /// XFS scratch disk at /var/lib/bivouac; sparse, thrown away
    #[arg(long, default_value_t = DISK_MIB)]
    pub disk_mib: u32,
    /// End the lab this many seconds after its start, with exit status 124
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,
    /// Pass on an environment variable, or set one
    #[arg(long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// One more folder that the command may change for good
    #[arg(long, value_name = "FOLDER")]
    pub share: Vec<PathBuf>,
    /// Start once more if the lab itself stalls (exit status 125 otherwise). The command gets no standard input
    #[arg(long)]
    pub retry_stalled: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

impl Default for Options {
    /// As if only a command had been given; tells clap nothing.
    fn default() -> Self {
        Self {
            cpus: CPUS,
            memory_mib: MEMORY_MIB,
            disk_mib: DISK_MIB,
            timeout: None,
            env: Vec::new(),
            share: Vec::new(),
            retry_stalled: false,
            command: Vec::new(),
        }
    }
}

/// How a stay in the lab ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Exit(i32),
    Stalled,
    TimedOut,
}

/// Runs the command in the lab; its exit status is ours.
pub fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    host::need_root("the lab, which serves this machine's files,")?;
    host::need(cache, host::LAB)?;
    let mut end = stay(cache, options)?;
    if end == End::Stalled && options.retry_stalled {
        eprintln!("xtask: the lab stalled; starting it once more (what was printed so far is void)");
        end = stay(cache, options)?;
    }
    Ok(match end {
        End::Exit(status) => ExitCode::from(u8::try_from(status).unwrap_or(255)),
        End::Stalled => {
            eprintln!("xtask: the lab stalled: no sign of life for {} s", SILENCE.as_secs());
            ExitCode::from(STALLED)
        }
        End::TimedOut => {
            eprintln!(
                "xtask: the command was still running in the lab after its {} s",
                options.timeout.unwrap_or(0)
            );
            ExitCode::from(TIMED_OUT)
        }
    })
}

fn stay(cache: &Cache, options: &Options) -> Result<End> {
    let parts = parts::get(cache)?;
    let folder = cache.root().join("lab/run");
    std::fs::create_dir_all(&folder)?;
    let helper = helper(&folder)?;
    let shared = shared(cache, options, &helper)?;
    let shared: Vec<&Path> = shared.iter().map(PathBuf::as_path).collect();
    let settings = initramfs::Settings { helper: &helper, modules: &parts.modules, shared: &shared };
    let initramfs = initramfs::build(&settings)?;

    let messages = cache.log_file(&format!("lab-{}", std::process::id()))?;
    let size = Size { cpus: options.cpus, memory_mib: options.memory_mib, disk_mib: options.disk_mib };
    let machine = Machine::start(&parts, &size, &initramfs, &messages, &folder)?;

    let mut port = machine.port.try_clone()?;
    let raw = if options.retry_stalled { None } else { Raw::enter() };
    wire::send(&mut port, Kind::Job, &serde_json::to_vec(&job(options, raw.as_ref().map(|raw| raw.size))?)?)?;
    if options.retry_stalled {
        wire::send(&mut port, Kind::Stdin, b"")?;
    } else {
        std::thread::spawn(move || feed(port));
    }
    let end = follow(&machine.port, options.timeout.map(Duration::from_secs), SILENCE);
    drop(raw);
    drop(machine);
    match end {
        Ok(end @ (End::Exit(_) | End::TimedOut)) => {
            std::fs::remove_file(&messages)?;
            Ok(end)
        }
        Ok(End::Stalled) => {
            eprintln!("xtask: the lab's console is in {}", messages.display());
            Ok(End::Stalled)
        }
        Err(why) => {
            let console = std::fs::read(&messages).unwrap_or_default();
            let console = String::from_utf8_lossy(&console).into_owned();
            let lines: Vec<&str> = console.lines().collect();
            let tail = lines.get(lines.len().saturating_sub(20)..).unwrap_or_default().join("\n    ");
            Err(why.context(format!(
                "the lab ended by itself; its console, {}, ends\n    {tail}\n",
                messages.display()
            )))
        }
    }
}

/// Passes on what the lab says until it says how the command ended, or says nothing.
fn follow(port: &UnixStream, timeout: Option<Duration>, silence: Duration) -> Result<End> {
    let begun = Instant::now();
    let mut port = Patient { port, until: timeout.map(|timeout| begun + timeout), silence, end: None };
    loop {
        let message = wire::receive(&mut port);
        if let Some(end) = port.end {
            return Ok(end);
        }
        // A reader of ours that is slow does not count as silence: time only passes while waiting for the lab. One
        // that is gone is no reason to end the command.
        match message? {
            (Kind::Stdout, data) => {
                drop(std::io::stdout().write_all(&data).and_then(|()| std::io::stdout().flush()));
            }
            (Kind::Stderr, data) => drop(std::io::stderr().write_all(&data)),
            (Kind::Exit, status) => {
                return Ok(End::Exit(i32::from_le_bytes(status.as_slice().try_into()?)));
            }
            _ => {}
        }
    }
}

/// Reads from the lab, each time for no longer than it may be silent or the command may run.
struct Patient<'a> {
    port: &'a UnixStream,
    until: Option<Instant>,
    silence: Duration,
    end: Option<End>,
}

impl Read for Patient<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        let (wait, end) = match left {
            Some(left) if left < self.silence => (left, End::TimedOut),
            _ => (self.silence, End::Stalled),
        };
        if wait.is_zero() {
            self.end = Some(end);
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        self.port.set_read_timeout(Some(wait))?;
        let mut port = self.port;
        let result = port.read(buffer);
        if result.as_ref().is_err_and(|why| why.kind() == std::io::ErrorKind::WouldBlock) {
            self.end = Some(end);
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        result
    }
}

fn feed(mut port: UnixStream) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let count = std::io::stdin().read(&mut buffer).unwrap_or(0);
        let sent = wire::send(&mut port, Kind::Stdin, buffer.get(..count).unwrap_or_default());
        if count == 0 || sent.is_err() {
            return;
        }
    }
}

/// This program, by a path that leads to it inside too.
fn helper(folder: &Path) -> Result<PathBuf> {
    let path = std::env::current_exe().context("cannot tell where this program is")?;
    if path.is_file() {
        return Ok(path);
    }
    // A later build took its place.
    let copy = folder.join(format!("xtask-{}", std::process::id()));
    std::fs::copy("/proc/self/exe", &copy).with_context(|| format!("cannot copy to {}", copy.display()))?;
    Ok(copy)
}

fn job(options: &Options, terminal: Option<terminal::Size>) -> Result<Job> {
    let mut env: Vec<(String, String)> =
        ENVIRONMENT.iter().filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?))).collect();
    for wish in &options.env {
        match wish.split_once('=') {
            Some((name, value)) => env.push((name.to_owned(), value.to_owned())),
            None => env.extend(std::env::var(wish).ok().map(|value| (wish.clone(), value))),
        }
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let cwd = std::env::current_dir()?;
    let cwd = cwd.to_str().with_context(|| format!("{} is not UTF-8", cwd.display()))?.to_owned();
    Ok(Job { argv: options.command.clone(), env, cwd, now_ns: u64::try_from(now.as_nanos())?, terminal })
}

/// The folders that are the machine's own inside, each by its real path, none inside another.
fn shared(cache: &Cache, options: &Options, helper: &Path) -> Result<Vec<PathBuf>> {
    let mut folders = vec![repository(), cache.root().to_owned()];
    folders.extend(helper.parent().map(Path::to_owned));
    folders.extend(std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from).filter(|folder| folder.is_dir()));
    folders.extend(options.share.iter().cloned());
    let mut real = folders
        .iter()
        .map(|folder| folder.canonicalize().with_context(|| format!("cannot share {}", folder.display())))
        .collect::<Result<Vec<_>>>()?;
    real.sort();
    real.dedup_by(|inner, outer| inner.starts_with(&*outer));
    Ok(real)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[test]
    fn a_silent_lab_is_stalled_and_not_the_commands_failure() {
        let (here, _there) = UnixStream::pair().unwrap();
        assert_eq!(follow(&here, None, SOON).unwrap(), End::Stalled);
    }

    #[test]
    fn a_lab_that_speaks_past_the_commands_time_has_timed_out() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let speaker = std::thread::spawn(move || {
            while wire::send(&mut there, Kind::Alive, b"").is_ok() {
                std::thread::sleep(SOON / 10);
            }
        });
        assert_eq!(follow(&here, Some(SOON), SOON * 100).unwrap(), End::TimedOut);
        drop(here);
        speaker.join().unwrap();
    }

    #[test]
    fn the_exit_status_is_the_commands_own() {
        let (here, mut there) = UnixStream::pair().unwrap();
        wire::send(&mut there, Kind::Alive, b"").unwrap();
        wire::send(&mut there, Kind::Exit, &42_i32.to_le_bytes()).unwrap();
        assert_eq!(follow(&here, None, SOON).unwrap(), End::Exit(42));
    }

    #[test]
    fn a_lab_that_ends_before_the_command_is_an_error() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        assert!(follow(&here, None, SOON).is_err());
    }
}
