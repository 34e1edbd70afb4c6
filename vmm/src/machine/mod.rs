//! One machine: put together, run until it ends, paused, saved and taken up again in between.
//!
//! ```text
//!            start::boot ┐              ┌── pause ──▶ paused ── snapshot ──▶ paused
//!  process ──            ├──▶ running ──┤               │
//!         start::restore ┘       ▲      └── ends        │
//!                                └──────── resume ──────┘
//! ```
//!
//! Threads: this one (control), which holds the conversation with the daemon; one for the devices' queues; one for
//! each virtual processor. Pausing stops the processors first, so that nobody touches a register any more, and then
//! puts each device to sleep, which takes its queues out of the device thread's hands. What is left is plain data that
//! this thread alone holds.

mod live;
mod parts;
mod slots;
mod start;
#[cfg(test)]
mod tests;

pub use live::Live;
pub use parts::{Beginnings, Parts, Saved, inherited};
pub use start::{Origin, start};

use crate::{
    control::Control,
    ending::{Ending, Endings},
    jail::seccomp,
    reception::Reception,
};
use bivouac_protocol::monitor::{FromMonitor, StopReason, Timing};
use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use std::{cell::RefCell, rc::Rc, time::Instant};
use vmm_sys_util::eventfd::EventFd;

/// Something the device thread serves.
type Subscriber = Box<dyn MutEventSubscriber + Send>;

/// A machine that has been put together and has not run yet.
pub struct Machine {
    live: Live,
    ending: Ending,
    endings: Endings,
    /// Written when the guest resets the machine.
    reset: EventFd,
    timing: Timing,
}

impl Machine {
    /// Runs the guest until it ends, and says why it did: to the daemon, if one is connected, and to the caller.
    pub fn run(mut self, mut control: Control, started: Instant) -> StopReason {
        let mut events = match EventManager::new() {
            Ok(events) => events,
            Err(e) => return StopReason::Fault { detail: format!("event loop: {e}") },
        };
        self.timing.booted_us = micros(started);
        control.send(&FromMonitor::Booted(self.timing));
        // Before the guest runs: from its first instruction on, every thread is behind its filter.
        if let Err(error) = seccomp::enter(seccomp::Thread::Control).and_then(|()| self.live.resume()) {
            self.ending.fault(error);
        }
        let over = Rc::new(RefCell::new(None));
        events.add_subscriber(Reception::new(control, self.endings, self.reset, self.live, over.clone()));
        loop {
            if let Err(e) = events.run() {
                return StopReason::Fault { detail: format!("event loop: {e}") };
            }
            if let Some(reason) = over.take() {
                return reason;
            }
        }
    }
}

pub fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
