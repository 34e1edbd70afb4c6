//! A terminal in the lab, for commands that a person talks to: `cargo xtask lab -- bash`.
//!
//! If standard input and output are both a terminal, the command gets one of its own, of the same size, and ours hands
//! every key through, Ctrl-C included. Standard error is then part of it, as at any terminal.

use std::fs::File;
use std::io::IsTerminal;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use rustix::process::{ioctl_tiocsctty, setsid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, Termios, Winsize, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Size {
    pub rows: u16,
    pub columns: u16,
}

/// Our terminal, handing everything through until this is dropped.
#[derive(Debug)]
pub struct Raw {
    before: Termios,
    pub size: Size,
}

impl Raw {
    /// None if no person is at a terminal.
    pub fn enter() -> Option<Self> {
        let (input, output) = (std::io::stdin(), std::io::stdout());
        if !input.is_terminal() || !output.is_terminal() {
            return None;
        }
        let size = tcgetwinsize(&output).ok()?;
        let before = tcgetattr(&input).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(&input, OptionalActions::Now, &raw).ok()?;
        Some(Self { before, size: Size { rows: size.ws_row, columns: size.ws_col } })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Gives the command a terminal; returns the other side of it.
pub fn give(command: &mut Command, size: Size) -> Result<File> {
    let near = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).context("openpt")?;
    grantpt(&near)?;
    unlockpt(&near)?;
    let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&near, size)?;
    let name = ptsname(&near, Vec::new())?;
    let far: OwnedFd = File::options().read(true).write(true).open(name.to_str()?)?.into();
    command.stdin(far.try_clone()?).stdout(far.try_clone()?).stderr(Stdio::from(far));
    let prepare = || {
        setsid()?;
        // Standard input is the terminal by now.
        ioctl_tiocsctty(rustix::stdio::stdin().as_fd())?;
        Ok(())
    };
    // SAFETY: between fork and exec it makes two system calls, and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
    Ok(near.into())
}
