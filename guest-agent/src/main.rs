//! PID 1 of a sandbox: one static program that makes a userland out of an image and a disk, announces itself to the
//! daemon, and from then on runs commands and moves files for it.
//!
//! Everything but a file transfer happens on one thread: the connections, every command's pipes, and the one place
//! that reaps processes, so that no exit status can be taken by the wrong reader.

mod channel;
mod command;
mod files;
mod identity;
mod init;
mod server;
mod users;

use std::process::ExitCode;

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("bivouac-agent {}: runs as PID 1 of a sandbox, and only there", env!("CARGO_PKG_VERSION"));
        return ExitCode::from(2);
    }
    let failure = match init::prepare() {
        Ok(settings) => match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => match tokio::task::LocalSet::new().block_on(&runtime, server::run(settings)) {
                Ok(never) => match never {},
                Err(e) => e,
            },
            Err(e) => init::Error::io("start the event loop")(e),
        },
        Err(e) => e,
    };
    // A sandbox without its agent is of no use to anybody: say why, for whoever has a console, and end the machine.
    eprintln!("bivouac-agent: {failure}");
    init::power_off()
}
