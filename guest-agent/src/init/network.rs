//! Loopback. Any other device belongs to the network policy, and is not here unless a template asks for it.

use super::Error;
use std::{io, os::fd::AsRawFd};

pub fn bring_up_loopback() -> Result<(), Error> {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").map_err(Error::io("make a socket"))?;
    // SAFETY: `ifreq` is plain data, for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(b"lo") {
        *slot = *byte as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request names an interface and its flags, as SIOCSIFFLAGS reads them, and outlives the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &request) };
    if result < 0 {
        return Err(Error::io("bring up loopback")(io::Error::last_os_error()));
    }
    Ok(())
}
