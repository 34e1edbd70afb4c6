//! PID 1 of the lab: runs one command, passes its streams on, and says how it ended.
//!
//! As PID 1 it also reaps what others leave behind, so that a test which counts processes counts no zombies.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{WaitOptions, wait};
use rustix::time::{ClockId, Timespec, clock_settime};

use super::terminal;
use super::wire::{self, CHUNK, Job, Kind};

/// How long output is still read after the command ended, while a process it left behind holds the pipe.
const DRAIN: Duration = Duration::from_secs(1);

type Port = Arc<Mutex<File>>;

/// Never returns with the lab still of use: the other side ends the machine once it has the exit status.
pub fn run() -> Result<()> {
    let path = port()?;
    let mut from = File::options().read(true).write(true).open(&path).context("cannot open the port")?;
    let to: Port = Arc::new(Mutex::new(from.try_clone()?));
    let beat = Arc::clone(&to);
    std::thread::spawn(move || {
        while tell(&beat, Kind::Alive, b"").is_ok() {
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    let (Kind::Job, job) = wire::receive(&mut from)? else { bail!("the first message was no job") };
    let job: Job = serde_json::from_slice(&job)?;
    set_clock(job.now_ns)?;
    let status = match command(&job, from, &to) {
        Ok(status) => status,
        Err(why) => {
            tell(&to, Kind::Stderr, format!("lab: cannot run {:?}: {why:#}\n", job.argv).as_bytes())?;
            127
        }
    };
    // What was written through a mapping reaches the machine only now.
    rustix::fs::sync();
    tell(&to, Kind::Exit, &status.to_le_bytes())?;
    loop {
        std::thread::park();
    }
}

fn command(job: &Job, stdin: File, to: &Port) -> Result<i32> {
    let (program, arguments) = job.argv.split_first().context("no command")?;
    let path = job.env.iter().find(|(name, _)| name == "PATH").map_or("/usr/bin:/bin", |(_, path)| path);
    let mut command = Command::new(find(program, path, Path::new(&job.cwd)));
    command.arg0(program).args(arguments).env_clear().current_dir(&job.cwd);
    command.envs(job.env.iter().map(|(name, value)| (name, value)));
    let (done, finished) = channel();
    let child = if let Some(size) = job.terminal {
        let terminal = terminal::give(&mut command, size)?;
        let keys = terminal.try_clone()?;
        let child = command.spawn()?;
        std::thread::spawn(move || feed(stdin, keys));
        pump(terminal, Kind::Stdout, to, done);
        child
    } else {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        if let Some(pipe) = child.stdin.take() {
            std::thread::spawn(move || feed(stdin, pipe));
        }
        if let Some(pipe) = child.stdout.take() {
            pump(pipe, Kind::Stdout, to, done.clone());
        }
        if let Some(pipe) = child.stderr.take() {
            pump(pipe, Kind::Stderr, to, done);
        }
        child
    };
    // Ours is a copy that would keep the terminal open.
    drop(command);
    let status = reap(child.id())?;
    // Each stream says that it is done, and then there is none left that could.
    while finished.recv_timeout(DRAIN).is_ok() {}
    Ok(status)
}

/// Waits for every process there is until `leader` is the one that ended.
fn reap(leader: u32) -> Result<i32> {
    loop {
        let Some((pid, status)) = wait(WaitOptions::empty())? else { continue };
        if u32::try_from(pid.as_raw_nonzero().get()).is_ok_and(|pid| pid == leader) {
            let signal = status.terminating_signal().map(|signal| 128 + signal);
            return Ok(status.exit_status().or(signal).unwrap_or(255));
        }
    }
}

fn feed(mut from: File, mut to: impl Write) {
    while let Ok((Kind::Stdin, data)) = wire::receive(&mut from) {
        if data.is_empty() || to.write_all(&data).is_err() {
            break;
        }
    }
}

fn pump(mut from: impl Read + Send + 'static, kind: Kind, to: &Port, done: Sender<()>) {
    let to = Arc::clone(to);
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if tell(&to, kind, buffer.get(..count).unwrap_or_default()).is_err() {
                break;
            }
        }
        let _ = done.send(());
    });
}

fn tell(port: &Port, kind: Kind, data: &[u8]) -> Result<()> {
    let mut port = port.lock().map_err(|_| anyhow::anyhow!("another stream broke the port"))?;
    wire::send(&mut *port, kind, data)
}

/// The device file of the port with our name.
fn port() -> Result<String> {
    for entry in fs::read_dir("/sys/class/virtio-ports").context("this is not the lab: it has no ports")? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("name")).is_ok_and(|name| name.trim() == wire::PORT) {
            return Ok(format!("/dev/{}", entry.file_name().to_string_lossy()));
        }
    }
    bail!("this is not the lab: no port is named {}", wire::PORT)
}

fn set_clock(now_ns: u64) -> Result<()> {
    let time = Timespec {
        tv_sec: i64::try_from(now_ns / 1_000_000_000)?,
        tv_nsec: i64::try_from(now_ns % 1_000_000_000)?,
    };
    clock_settime(ClockId::Realtime, time).context("cannot set the clock")
}

/// The program by the command's own PATH, not by ours.
fn find(program: &str, path: &str, cwd: &Path) -> std::path::PathBuf {
    if program.contains('/') {
        return cwd.join(program);
    }
    path.split(':')
        .map(|dir| Path::new(dir).join(program))
        .find(|file| file.is_file())
        .unwrap_or(program.into())
}
