//! The control thread's dealings: with the daemon's requests, and with the machine's end.

use crate::{
    Error,
    control::{Control, Received},
    cpu::Exit,
    ending::Endings,
    machine::Live,
};
use bivouac_protocol::monitor::{FromMonitor, State, StopReason, ToMonitor};
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use std::{
    cell::RefCell,
    fs::File,
    os::fd::{AsRawFd, OwnedFd},
    rc::Rc,
};
use vmm_sys_util::eventfd::EventFd;

pub struct Reception {
    control: Control,
    endings: Endings,
    /// Written when the guest resets the machine.
    reset: EventFd,
    machine: Live,
    /// Where the event loop looks for the end.
    over: Rc<RefCell<Option<StopReason>>>,
}

impl Reception {
    const LISTENER: u32 = 0;
    const PEER: u32 = 1;
    const RESET: u32 = 2;
    const ENDED: u32 = 3;

    pub fn new(
        control: Control,
        endings: Endings,
        reset: EventFd,
        machine: Live,
        over: Rc<RefCell<Option<StopReason>>>,
    ) -> Self {
        Self { control, endings, reset, machine, over }
    }

    fn end(&mut self, reason: StopReason) {
        let mut over = self.over.borrow_mut();
        if over.is_none() {
            self.control.send(&FromMonitor::Stopped(reason.clone()));
            *over = Some(reason);
        }
    }

    fn watch_peer(&mut self, ops: &mut EventOps) {
        if let Some(peer) = self.control.peer()
            && let Err(e) = ops.add(Events::with_data(&peer, Self::PEER, EventSet::IN))
        {
            eprintln!("bivouac-vmm: cannot serve a control connection: {e}");
        }
    }

    fn admit(&mut self, ops: &mut EventOps) {
        if let Some(before) = self.control.peer() {
            let _ = ops.remove(Events::empty(&before));
        }
        match self.control.accept() {
            Ok(()) => self.watch_peer(ops),
            Err(e) => eprintln!("bivouac-vmm: {e}"),
        }
    }

    fn hear(&mut self, ops: &mut EventOps) {
        let watched = self.control.peer().map(|peer| peer.as_raw_fd());
        match self.control.receive(false) {
            Received::Message(ToMonitor::Stop, _) => self.end(StopReason::Requested),
            Received::Message(request, files) => {
                let answer = self.carry_out(&request, files);
                self.control.send(&answer);
            }
            Received::Gone(_) => {
                // Its descriptor is closed, and with it out of the epoll set; this clears the manager's own record.
                if let Some(fd) = watched {
                    let _ = ops.remove(Events::empty_raw(fd));
                }
            }
            Received::Nothing => {}
        }
    }

    fn carry_out(&mut self, request: &ToMonitor, files: Vec<OwnedFd>) -> FromMonitor {
        let outcome = match request {
            ToMonitor::Status => {
                let state = if self.machine.is_paused() { State::Paused } else { State::Running };
                return FromMonitor::Status { state, exits: self.machine.exits() };
            }
            ToMonitor::Pause => self.machine.pause().map(|()| FromMonitor::Paused),
            ToMonitor::Resume => self.machine.resume().map(|()| FromMonitor::Resumed),
            ToMonitor::Snapshot => match <[OwnedFd; 2]>::try_from(files) {
                Ok([state, memory]) => self
                    .machine
                    .snapshot(&File::from(state), &File::from(memory))
                    .map(|()| FromMonitor::Snapshotted),
                Err(_) => Err(Error::Control("a snapshot needs two files: state and memory".into())),
            },
            ToMonitor::Boot(_) | ToMonitor::Restore(_) => Err(Error::Control("already booted".into())),
            ToMonitor::Stop => return FromMonitor::Stopped(StopReason::Requested),
        };
        outcome.unwrap_or_else(|error| FromMonitor::Refused { detail: error.to_string() })
    }
}

impl MutEventSubscriber for Reception {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            Self::LISTENER => self.admit(ops),
            Self::PEER => self.hear(ops),
            Self::RESET => self.end(StopReason::GuestShutdown),
            _ => match self.endings.heard() {
                Some(Exit::Shutdown) => self.end(StopReason::GuestShutdown),
                Some(Exit::Crash(detail)) => self.end(StopReason::GuestCrash { detail }),
                Some(Exit::Fault(error)) => self.end(StopReason::Fault { detail: error.to_string() }),
                None => {}
            },
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        let added = [
            ops.add(Events::with_data(&self.control.listener(), Self::LISTENER, EventSet::IN)),
            ops.add(Events::with_data(&self.reset, Self::RESET, EventSet::IN)),
            ops.add(Events::with_data(&self.endings, Self::ENDED, EventSet::IN)),
        ];
        self.watch_peer(ops);
        if let Some(e) = added.into_iter().find_map(Result::err) {
            self.end(StopReason::Fault { detail: Error::Control(e.to_string()).to_string() });
        }
    }
}
