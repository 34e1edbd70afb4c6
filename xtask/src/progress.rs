//! Long steps, shown on standard error while they run and logged in full in the cache.
//!
//! Standard output is left alone: it belongs to the paths and results that callers read.

use std::fs::{self, File};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cache::Cache;

/// Steps shorter than this are not worth a line.
const QUIET: Duration = Duration::from_secs(2);
/// How often a log file (not a terminal) is told that a step still runs.
const REMINDER: Duration = Duration::from_secs(30);
/// Lines of the log that a failure shows.
const TAIL: usize = 20;

/// One named piece of work. Dropping it ends its line.
#[derive(Debug)]
pub struct Step {
    log: PathBuf,
    end: Option<Sender<()>>,
    painter: Option<JoinHandle<()>>,
}

impl Step {
    pub fn begin(cache: &Cache, name: &str) -> Result<Self> {
        let log = cache.log_file(name)?;
        File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let (end, ended) = channel();
        let title = name.to_owned();
        let painter = std::thread::spawn(move || paint(&title, &ended));
        Ok(Self { log, end: Some(end), painter: Some(painter) })
    }

    /// Runs a command with its output in the step's log; an error names the command, the log, and its last lines.
    pub fn run(&self, command: &mut Command) -> Result<()> {
        self.run_with(command, Stdio::null())
    }

    /// Like [`Step::run`], with something on standard input.
    pub fn run_with(&self, command: &mut Command, input: Stdio) -> Result<()> {
        let mut log = File::options().append(true).open(&self.log)?;
        let shown = show(command);
        writeln!(log, "$ {shown}")?;
        let status = command
            .stdin(input)
            .stdout(log.try_clone()?)
            .stderr(log)
            .status()
            .with_context(|| format!("cannot start `{shown}`"))?;
        if status.success() {
            return Ok(());
        }
        bail!("`{shown}` failed ({status}); the whole log is {}\n{}", self.log.display(), self.tail())
    }

    fn tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let from = lines.len().saturating_sub(TAIL);
        lines.get(from..).unwrap_or_default().iter().map(|line| format!("    {line}\n")).collect()
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(painter) = self.painter.take() {
            let _ = painter.join();
        }
    }
}

/// A command as a person would type it (without quoting; for messages only).
pub fn show(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy().into_owned()));
    words.join(" ")
}

fn paint(name: &str, ended: &Receiver<()>) {
    let begun = Instant::now();
    let terminal = std::io::stderr().is_terminal();
    if ended.recv_timeout(QUIET) != Err(RecvTimeoutError::Timeout) {
        return;
    }
    let every = if terminal { Duration::from_millis(500) } else { REMINDER };
    loop {
        let time = human(begun.elapsed());
        if terminal {
            eprint!("\r  ... {name} ({time}) ");
        } else {
            eprintln!("  ... {name} ({time})");
        }
        if ended.recv_timeout(every) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    let lead = if terminal { "\r" } else { "" };
    eprintln!("{lead}  [{}] {name}       ", human(begun.elapsed()));
}

fn human(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 60 { format!("{seconds} s") } else { format!("{} min {:02} s", seconds / 60, seconds % 60) }
}
