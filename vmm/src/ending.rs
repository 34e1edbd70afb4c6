//! How anything in the process says that the machine is over. The first word counts.

use crate::{Error, cpu::Exit};
use std::{
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The saying end.
#[derive(Clone)]
pub struct Ending {
    exits: Sender<Exit>,
    event: Arc<EventFd>,
}

/// The hearing end: readable, as a descriptor, when something was said.
pub struct Endings {
    exits: Receiver<Exit>,
    event: Arc<EventFd>,
}

pub fn channel_of_endings() -> Result<(Ending, Endings), Error> {
    let (sender, receiver) = channel();
    let event = Arc::new(EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?);
    Ok((Ending { exits: sender, event: event.clone() }, Endings { exits: receiver, event }))
}

impl Ending {
    pub fn fault(&self, error: Error) {
        self.exit(Exit::Fault(error));
    }

    pub fn exit(&self, exit: Exit) {
        // Neither can fail while the main thread, which owns the hearing end, lives.
        let _ = self.exits.send(exit);
        let _ = self.event.write(1);
    }
}

impl Endings {
    pub fn heard(&self) -> Option<Exit> {
        let _ = self.event.read();
        self.exits.try_recv().ok()
    }
}

impl AsRawFd for Endings {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
