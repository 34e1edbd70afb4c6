//! Where guests can run: on this machine's own KVM if it is fit, else in the lab.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::{host, lab};

/// Set to 1, takes /dev/kvm as fit without looking.
const FORCE_KVM: &str = "BIVOUAC_FORCE_KVM";
/// Set to 1, goes to the lab without looking.
const FORCE_LAB: &str = "BIVOUAC_FORCE_LAB";

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    Here,
    /// In the lab, and why not here.
    Lab(String),
}

/// Something to run where guests can run.
#[derive(Debug)]
pub struct Guests<'a> {
    pub program: &'a Path,
    pub arguments: &'a [String],
    pub env: &'a [(&'a str, String)],
    /// Folders that it reads what was just built from, or writes what is to stay.
    pub shared: &'a [PathBuf],
    /// It may be run again from the start if the lab stalls; it then has no standard input.
    pub retryable: bool,
    /// Ended after this long in the lab, where a hang would otherwise look like work.
    pub seconds: u64,
}

impl Place {
    /// Decides, and says so in one line.
    pub fn choose() -> Self {
        let place = match host_can_run_guests() {
            Ok(()) => Self::Here,
            Err(why) => Self::Lab(why),
        };
        match &place {
            Self::Here => eprintln!("xtask: guests run on this machine's own KVM"),
            Self::Lab(why) => {
                eprintln!("xtask: guests run in the lab, an emulated bare-metal host, since {why}");
            }
        }
        place
    }

    pub fn run(&self, cache: &Cache, guests: &Guests<'_>) -> Result<ExitCode> {
        match self {
            Self::Here => here(guests),
            Self::Lab(_) => {
                let mut command = vec![guests.program.display().to_string()];
                command.extend(guests.arguments.iter().cloned());
                let env = guests.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
                let options = lab::Options {
                    env,
                    share: guests.shared.to_vec(),
                    retry_stalled: guests.retryable,
                    timeout: Some(guests.seconds),
                    command,
                    ..lab::Options::default()
                };
                lab::run(cache, &options)
            }
        }
    }
}

fn here(guests: &Guests<'_>) -> Result<ExitCode> {
    let status = Command::new(guests.program)
        .args(guests.arguments)
        .envs(guests.env.iter().map(|(name, value)| (name, value)))
        .status()
        .with_context(|| format!("cannot start {}", guests.program.display()))?;
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(255)))
}

/// Ok if a Linux guest would run here and could be talked to, else why not, in plain words.
fn host_can_run_guests() -> Result<(), String> {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
    if set(FORCE_LAB) {
        return Err(format!("{FORCE_LAB} is set"));
    }
    if set(FORCE_KVM) {
        return Ok(());
    }
    if let Some(problem) = bivouac_vmm::probe::run().first_problem() {
        return Err(format!("this machine's KVM cannot run Linux guests ({problem})"));
    }
    if !opens("/dev/vhost-vsock") && host::is_root() {
        // Not being able to load it shows in the next line.
        let _ = Command::new("modprobe").arg("vhost_vsock").stderr(Stdio::null()).status();
    }
    if !opens("/dev/vhost-vsock") {
        return Err("/dev/vhost-vsock cannot be opened (try `modprobe vhost_vsock`, as root)".to_owned());
    }
    Ok(())
}

fn opens(path: &str) -> bool {
    File::options().read(true).write(true).open(path).is_ok()
}
