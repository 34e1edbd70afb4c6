//! `bivouac-vmm`: started by the daemon with its descriptors in place, told what to run, and gone when the machine is.

use bivouac_protocol::monitor::{FromMonitor, StopReason, ToMonitor, fd};
use bivouac_vmm::{
    Error,
    control::{Control, Received},
    machine::{self, Beginnings, Origin, Parts, inherited},
};
use std::{process::ExitCode, time::Instant};

/// Exit codes: 0 the machine ended, 1 it could not be made or broke, 2 this program was started wrongly; 159 a
/// forbidden system call.
fn main() -> ExitCode {
    let started = Instant::now();
    if std::env::args().nth(1).as_deref() == Some("--version") {
        println!("bivouac-vmm {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    // One arena for all threads: each of its own would cost pages and map memory on threads that need neither.
    // SAFETY: called before any other thread exists.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
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
    let parts = Parts::inherit().map_err(Stop::Misuse)?;
    let beginnings = Beginnings::inherit();
    let network = inherited(fd::NETWORK);
    // Held, and its flock with it, until the process ends.
    let _lock = inherited(fd::LOCK);

    let mut control = Control::new(listener);
    control.accept().map_err(Stop::Failed)?;
    let origin = orders(&mut control, beginnings).map_err(Stop::Misuse)?;
    match machine::start(origin, parts, network, started) {
        Ok(machine) => Ok(machine.run(control, started)),
        Err(error) => {
            control.send(&FromMonitor::Failed { detail: error.to_string() });
            Err(Stop::Failed(error))
        }
    }
}

/// Waits to be told what to run, and takes what that needs.
fn orders(control: &mut Control, beginnings: Beginnings) -> Result<Origin, String> {
    loop {
        match control.receive(true) {
            Received::Message(ToMonitor::Boot(config), _) => {
                return Ok(Origin::Boot { config, kernel: beginnings.kernel()? });
            }
            Received::Message(ToMonitor::Restore(config), _) => {
                return Ok(Origin::Restore { config, saved: beginnings.saved()? });
            }
            Received::Message(..) => return Err("the first message has to be Boot or Restore".into()),
            Received::Gone(why) => return Err(format!("{why}, before it was said what to run")),
            Received::Nothing => {}
        }
    }
}
