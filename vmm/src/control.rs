//! The monitor's end of the control socket: one typed message per packet, one connection at a time.
//!
//! The listening socket is inherited, so that a daemon that restarts can connect again. Losing the connection changes
//! nothing for the machine.

use crate::Error;
use bivouac_protocol::monitor::{FromMonitor, MAX_MESSAGE, ToMonitor, decode, encode};
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketFlags,
        accept_with, recvmsg, send,
    },
};
use std::{
    io::IoSliceMut,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// Descriptors that may come with one message: a snapshot's two files.
const FILES_MAX: usize = 2;

pub struct Control {
    listener: OwnedFd,
    peer: Option<OwnedFd>,
}

/// What came of a look at the connection.
pub enum Received {
    /// And the descriptors that came along.
    Message(ToMonitor, Vec<OwnedFd>),
    /// The peer hung up, or said something that cannot be understood and was hung up on: which of them.
    Gone(&'static str),
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
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut packet)];
        let received = recvmsg(peer, parts, &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC);
        let message = match received {
            Ok(message) => message,
            Err(Errno::INTR | Errno::AGAIN) => return Received::Nothing,
            Err(_) => return self.hang_up("the connection broke"),
        };
        // Whatever came along is closed, should the message be none of ours.
        let files: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(files) => Some(files),
                _ => None,
            })
            .flatten()
            .collect();
        if message.bytes == 0 {
            return self.hang_up("the daemon hung up");
        }
        if message.flags.contains(ReturnFlags::TRUNC) {
            return self.hang_up("a message is longer than the longest there is");
        }
        // Or some were lost, because this process may not hold that many.
        if message.flags.contains(ReturnFlags::CTRUNC) || files.len() > FILES_MAX {
            return self.hang_up("a message came with more descriptors than there is room for");
        }
        match packet.get(..message.bytes).map(decode) {
            Some(Ok(message)) => Received::Message(message, files),
            Some(Err(_)) | None => self.hang_up("a message cannot be understood"),
        }
    }

    fn hang_up(&mut self, why: &'static str) -> Received {
        self.peer = None;
        Received::Gone(why)
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
