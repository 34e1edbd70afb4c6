//! The monitor's end of the control socket: one typed message per packet, one connection at a time.
//!
//! The listening socket is inherited, so that a daemon that restarts can connect again. Losing the connection changes
//! nothing for the machine.

use crate::Error;
use bivouac_protocol::monitor::{FromMonitor, MAX_MESSAGE, ToMonitor, decode, encode};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send},
};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub struct Control {
    listener: OwnedFd,
    peer: Option<OwnedFd>,
}

/// What came of a look at the connection.
pub enum Received {
    Message(ToMonitor),
    /// The peer hung up, or said something that cannot be understood and was hung up on.
    Gone,
    Nothing,
}

impl Control {
    pub fn new(listener: OwnedFd) -> Self {
        Self { listener, peer: None }
    }

    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    pub fn peer(&self) -> Option<BorrowedFd<'_>> {
        self.peer.as_ref().map(AsFd::as_fd)
    }

    /// Waits for a connection, which takes the place of the one before.
    pub fn accept(&mut self) -> Result<(), Error> {
        let peer = loop {
            match accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                other => break other.map_err(Error::io("accept a control connection"))?,
            }
        };
        self.peer = Some(peer);
        Ok(())
    }

    /// Reads one message; blocks only when `wait` is set.
    pub fn receive(&mut self, wait: bool) -> Received {
        let Some(peer) = &self.peer else { return Received::Nothing };
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        let mut packet = vec![0; MAX_MESSAGE];
        let len = match recv(peer, &mut packet[..], flags | RecvFlags::TRUNC) {
            Ok((_, len)) => len,
            Err(Errno::INTR | Errno::AGAIN) => return Received::Nothing,
            Err(_) => 0,
        };
        match packet.get(..len).filter(|packet| !packet.is_empty()).map(decode) {
            Some(Ok(message)) => Received::Message(message),
            Some(Err(_)) | None => {
                self.peer = None;
                Received::Gone
            }
        }
    }

    /// Sends one message, if anybody is connected. Never waits: a daemon that does not read loses the message, and
    /// learns what it has to know from [`ToMonitor::Status`] or from this process's end. That a peer is gone is found
    /// by [`Control::receive`], in one place.
    pub fn send(&mut self, message: &FromMonitor) {
        if let (Some(peer), Ok(packet)) = (&self.peer, encode(message)) {
            let _ = send(peer, &packet, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }
}
