//! `bivouac-vmm`: started by the daemon with its descriptors in place, told what to run, and gone when the machine is.

use bivouac_protocol::monitor::{FromMonitor, StopReason, ToMonitor, fd};
use bivouac_vmm::{
    Error,
    control::{Control, Received},
    machine::{Machine, Parts, micros},
};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use std::{
    fs::File,
    os::fd::{BorrowedFd, FromRawFd, OwnedFd},
    process::ExitCode,
    time::Instant,
};

/// Exit codes: 0 the machine ended, 1 it could not be made or broke, 2 this program was started wrongly.
fn main() -> ExitCode {
    let started = Instant::now();
    if std::env::args().nth(1).as_deref() == Some("--version") {
        println!("bivouac-vmm {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    match serve(started) {
        Ok(StopReason::Requested | StopReason::GuestShutdown) => ExitCode::SUCCESS,
        Ok(StopReason::GuestCrash { detail } | StopReason::Fault { detail }) => {
            eprintln!("bivouac-vmm: {detail}");
            ExitCode::FAILURE
        }
        Err(Stop::Misuse(why)) => {
            eprintln!("bivouac-vmm: {why}");
            ExitCode::from(2)
        }
        Err(Stop::Failed(error)) => {
            eprintln!("bivouac-vmm: {error}");
            ExitCode::FAILURE
        }
    }
}

enum Stop {
    Misuse(String),
    Failed(Error),
}

fn serve(started: Instant) -> Result<StopReason, Stop> {
    let listener = inherited(fd::CONTROL).ok_or_else(|| {
        Stop::Misuse(format!(
            "descriptor {} is not open. This is the monitor of one machine, started by bivouacd; \
             to run something in a sandbox use `bivouac run TEMPLATE -- COMMAND`",
            fd::CONTROL
        ))
    })?;
    let part = |number, what: &str| {
        inherited(number)
            .map(File::from)
            .ok_or_else(|| Stop::Misuse(format!("descriptor {number} ({what}) is not open")))
    };
    let parts = Parts {
        kernel: part(fd::KERNEL, "guest kernel")?,
        root: part(fd::ROOT, "root image")?,
        scratch: part(fd::SCRATCH, "scratch disk")?,
        cgroup: inherited(fd::CGROUP).map(File::from),
        tap: inherited(fd::TAP).map(File::from),
    };
    // Held, and its flock with it, until the process ends.
    let _lock = inherited(fd::LOCK);

    let mut control = Control::new(listener);
    control.accept().map_err(Stop::Failed)?;
    let config = loop {
        match control.receive(true) {
            Received::Message(ToMonitor::Boot(config)) => break config,
            Received::Message(_) => return Err(Stop::Misuse("the first message has to be Boot".into())),
            Received::Gone => {
                return Err(Stop::Misuse("the daemon hung up before it said what to boot".into()));
            }
            Received::Nothing => {}
        }
    };
    let configured_us = micros(started);

    let machine = match Machine::build(&config, parts, started) {
        Ok(machine) => machine,
        Err(error) => {
            control.send(&FromMonitor::Failed { detail: error.to_string() });
            return Err(Stop::Failed(error));
        }
    };
    Ok(machine.run(control, configured_us, started))
}

/// Takes over an inherited descriptor, if it is open, and keeps it from any child.
fn inherited(number: i32) -> Option<OwnedFd> {
    // SAFETY: only borrowed for the two calls that find out whether it is open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(borrowed).ok()?;
    fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC).ok()?;
    // SAFETY: it is open, this program opened nothing under a fixed number, and each number is taken once.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}
