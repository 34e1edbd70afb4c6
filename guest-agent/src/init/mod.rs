//! From the kernel's hand-over to a userland: file systems, limits, loopback.

mod cgroups;
mod mounts;
mod network;

pub use cgroups::{COMMANDS as COMMANDS_CGROUP, pids_of_one};

use bivouac_protocol::agent::PORT_PARAMETER;
use std::io;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {what}: {why}")]
    Io { what: String, why: io::Error },
    #[error("the kernel command line has no `{PORT_PARAMETER}=PORT`")]
    NoPort,
}

impl Error {
    pub fn io<E: Into<io::Error>>(what: &str) -> impl FnOnce(E) -> Self {
        let what = what.to_owned();
        move |why| Self::Io { what, why: why.into() }
    }
}

/// What the daemon put on the kernel command line.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Host port to announce to.
    pub port: u32,
}

/// Everything that has to stand before the first command can run. Nothing here waits for anybody.
pub fn prepare() -> Result<Settings, Error> {
    mounts::mount_all()?;
    let command_line = std::fs::read_to_string("/proc/cmdline").map_err(Error::io("read /proc/cmdline"))?;
    let settings = Settings { port: port(&command_line).ok_or(Error::NoPort)? };
    cgroups::prepare()?;
    network::bring_up_loopback()?;
    limits();
    Ok(settings)
}

fn port(command_line: &str) -> Option<u32> {
    command_line
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix(PORT_PARAMETER)?.strip_prefix('=')?.parse().ok())
}

/// What commands inherit: as many open files as a server may want, no core dumps on the sandbox's disk. How many
/// processes is the cgroups' to say: the kernel's own limit is by user, so one command could use up that of all.
fn limits() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let files = Rlimit { current: Some(1024), maximum: Some(524_288) };
    let _ = setrlimit(Resource::Nofile, files);
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: None });
    let _ = setrlimit(Resource::Nproc, Rlimit { current: None, maximum: None });
}

/// Writes out what is dirty and ends the machine.
pub fn power_off() -> ! {
    rustix::fs::sync();
    // The monitor ends the machine when the guest resets it; there is no power button to press.
    let _ = rustix::system::reboot(rustix::system::RebootCommand::Restart);
    loop {
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::port;

    #[test]
    fn the_port_is_found_among_other_parameters() {
        assert_eq!(port("quiet bivouac.port=1234 root=/dev/vda\n"), Some(1234));
        assert_eq!(port("bivouac.portal=1 xbivouac.port=2"), None);
        assert_eq!(port("bivouac.port=no"), None);
    }
}
