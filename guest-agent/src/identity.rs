//! What makes this guest this sandbox: name, randomness, time, environment. Applied before any command is admitted.

use crate::{
    init::Error,
    users::{self, User},
};
use bivouac_protocol::agent::Configure;
use std::{fs, io, os::fd::AsRawFd, os::unix::fs::chown, path::Path, path::PathBuf};

/// What commands start from.
#[derive(Debug, Clone)]
pub struct Identity {
    pub env: Vec<(String, String)>,
    pub user: String,
    pub workdir: String,
}

impl Identity {
    /// A path as a command would read it: relative ones start at the working directory.
    pub fn resolve(&self, path: &str) -> PathBuf {
        Path::new(&self.workdir).join(path)
    }
}

pub fn assume(configure: Configure) -> Result<Identity, Error> {
    let Configure { hostname, entropy, unix_time_ns, env, user, workdir } = configure;
    add_entropy(&entropy)?;
    set_clock(unix_time_ns)?;
    rustix::system::sethostname(hostname.as_bytes()).map_err(Error::io("set the hostname"))?;
    write_etc(&hostname)?;
    if let Ok(owner) = users::find(&user) {
        make_workdir(&workdir, &owner)?;
    }
    Ok(Identity { env, user, workdir })
}

/// `struct rand_pool_info` of <linux/random.h>, with room for 64 bytes.
#[repr(C)]
struct RandPoolInfo {
    entropy_count: libc::c_int,
    buf_size: libc::c_int,
    buf: [u8; 64],
}

const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Credits the bytes to the pool, and makes the generator start over from it: until then two clones of one machine
/// would draw the same numbers.
fn add_entropy(entropy: &[u8]) -> Result<(), Error> {
    let random =
        fs::File::options().write(true).open("/dev/urandom").map_err(Error::io("open /dev/urandom"))?;
    for chunk in entropy.chunks(64) {
        let mut info = RandPoolInfo {
            entropy_count: chunk.len() as i32 * 8,
            buf_size: chunk.len() as i32,
            buf: [0; 64],
        };
        for (slot, byte) in info.buf.iter_mut().zip(chunk) {
            *slot = *byte;
        }
        // SAFETY: the structure is laid out as the call reads it, and `buf_size` is within `buf`.
        if unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY as _, &raw const info) } < 0 {
            return Err(Error::io("credit entropy")(io::Error::last_os_error()));
        }
    }
    // SAFETY: takes no argument.
    if unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG as _) } < 0 {
        return Err(Error::io("reseed the random number generator")(io::Error::last_os_error()));
    }
    Ok(())
}

fn set_clock(unix_time_ns: u64) -> Result<(), Error> {
    let time = rustix::time::Timespec {
        tv_sec: i64::try_from(unix_time_ns / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(unix_time_ns % 1_000_000_000).unwrap_or(0),
    };
    rustix::time::clock_settime(rustix::time::ClockId::Realtime, time).map_err(Error::io("set the clock"))
}

/// Names that have to resolve, whatever the image holds.
fn write_etc(hostname: &str) -> Result<(), Error> {
    let hosts =
        format!("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 {hostname}\n");
    for (path, content) in [("/etc/hostname", format!("{hostname}\n")), ("/etc/hosts", hosts)] {
        replace(path, &content)?;
    }
    // No resolver stands behind a sandbox without a network. An empty file says so at once; a link into a /run that
    // nobody fills would have programs wait for one.
    if fs::symlink_metadata("/etc/resolv.conf").map_or(true, |found| !found.is_file()) {
        replace("/etc/resolv.conf", "")?;
    }
    Ok(())
}

fn replace(path: &str, content: &str) -> Result<(), Error> {
    if let Some(parent) = Path::new(path).parent() {
        let _ = fs::create_dir_all(parent);
    }
    // The image may have a link here, and what it points to is not ours to write.
    let _ = fs::remove_file(path);
    fs::write(path, content).map_err(Error::io(&format!("write {path}")))
}

fn make_workdir(workdir: &str, owner: &User) -> Result<(), Error> {
    if Path::new(workdir).is_dir() {
        return Ok(());
    }
    fs::create_dir_all(workdir).map_err(Error::io(&format!("make the working directory {workdir}")))?;
    chown(workdir, Some(owner.uid), Some(owner.gid))
        .map_err(Error::io(&format!("give {workdir} to its user")))
}
