//! The tap: an open descriptor of a TAP interface, made and configured by whoever started the monitor.
//!
//! It has to have been opened with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR` (Documentation/networking/tuntap.rst), so that each
//! `readv` and `writev` is one frame behind a `virtio_net_hdr`.

use super::{HEADER_LEN, feature, worker::Frames};
use crate::Error;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, RawFd},
};

/// What must be set among the interface's flags.
pub(super) const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

pub struct Tap(File);

impl Tap {
    /// Takes the descriptor over: checks what it is, and sets it up for frames behind 12-byte headers, without waiting.
    pub fn new(file: File) -> Result<Self, Error> {
        let tap = Self(file);
        let flags = tap.interface_flags().map_err(|e| {
            Error::Config(format!("the descriptor given as a network tap is not one of /dev/net/tun: {e}"))
        })?;
        if flags & FLAGS != FLAGS {
            return Err(Error::Config(
                "the network tap was not opened with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR".into(),
            ));
        }
        let len = HEADER_LEN as libc::c_int;
        // SAFETY: the call reads one int.
        succeed(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const len) })
            .map_err(Error::io("set the tap's header size"))?;
        tap.stop_waiting()?;
        Ok(tap)
    }

    /// Another descriptor of the same tap.
    pub fn try_clone(&self) -> Result<Self, Error> {
        self.0.try_clone().map(Self).map_err(Error::io("copy the tap's descriptor"))
    }

    /// Feature bits that the tap can keep: it is asked, and its kernel says no by an error.
    pub fn features(&self) -> u64 {
        use feature::{CSUM, GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, HOST_TSO4, HOST_TSO6};
        let checksums = CSUM | GUEST_CSUM;
        let segments = GUEST_TSO4 | GUEST_TSO6 | HOST_TSO4 | HOST_TSO6;
        let taken = [checksums | segments, checksums].into_iter().find(|set| self.offload(*set).is_ok());
        // What it does until a driver has said what it wants.
        let _ = self.offload(0);
        taken.unwrap_or(0)
    }

    /// Tells the tap which frames the driver takes as they are, by what was negotiated; the rest it makes plain first.
    pub fn offload(&self, features: u64) -> Result<(), Error> {
        let flags = offload_flags(features);
        // SAFETY: the argument is a value, not an address.
        succeed(unsafe { libc::ioctl(self.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(flags)) })
            .map_err(Error::io("set the tap's offloads"))
    }

    fn interface_flags(&self) -> io::Result<libc::c_int> {
        // SAFETY: all zeroes is a value of this struct of plain numbers, and the call fills in one.
        let (status, request) = unsafe {
            let mut request: libc::ifreq = std::mem::zeroed();
            (libc::ioctl(self.as_raw_fd(), libc::TUNGETIFF, &raw mut request), request)
        };
        succeed(status)?;
        // SAFETY: TUNGETIFF fills in this member of the union, and each bit pattern is a value of it.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        // A short whose top bit is a flag like the others.
        Ok(libc::c_int::from(flags) & 0xffff)
    }

    fn stop_waiting(&self) -> Result<(), Error> {
        let flags = fcntl_getfl(&self.0).map_err(Error::io("read the tap's flags"))?;
        fcntl_setfl(&self.0, flags | OFlags::NONBLOCK).map_err(Error::io("set the tap's flags"))
    }

    /// One end of a pair of sockets that keep frames apart, as a tap does.
    #[cfg(test)]
    pub(super) fn of_socket(socket: std::os::fd::OwnedFd) -> Self {
        Self(File::from(socket))
    }
}

/// Segments can only be left to be cut where checksums can be left to be filled in (section 5.1.3.1).
pub(super) fn offload_flags(features: u64) -> libc::c_uint {
    if features & feature::GUEST_CSUM == 0 {
        return 0;
    }
    let flag = |bit, flag| if features & bit == 0 { 0 } else { flag };
    libc::TUN_F_CSUM
        | flag(feature::GUEST_TSO4, libc::TUN_F_TSO4)
        | flag(feature::GUEST_TSO6, libc::TUN_F_TSO6)
}

fn succeed(status: libc::c_int) -> io::Result<()> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Frames for Tap {
    fn receive(&mut self, vectors: &[libc::iovec]) -> io::Result<Option<usize>> {
        // SAFETY: the worker's vectors are memory that nobody else has a reference to during the call.
        match moved(vectors, |first, count| unsafe { libc::readv(self.as_raw_fd(), first, count) }) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            other => other.map(Some),
        }
    }

    fn send(&mut self, vectors: &[libc::iovec]) -> io::Result<()> {
        // SAFETY: as above, and the kernel only reads.
        moved(vectors, |first, count| unsafe { libc::writev(self.as_raw_fd(), first, count) }).map(drop)
    }
}

/// Makes the call, again where a signal came in between.
fn moved(
    vectors: &[libc::iovec],
    call: impl Fn(*const libc::iovec, libc::c_int) -> isize,
) -> io::Result<usize> {
    let count = libc::c_int::try_from(vectors.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    loop {
        match usize::try_from(call(vectors.as_ptr(), count)) {
            Ok(bytes) => return Ok(bytes),
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
}
