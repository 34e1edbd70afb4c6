//! The glue between the worker and the world. Unlike a disk, a tap has something to say by itself; and each way can have to
//! wait for the other side of it.
//!
//! | event | what is done |
//! | --- | --- |
//! | kick of the receive queue | a pass that receives |
//! | kick of the transmit queue | a pass that transmits, unless the tap has no room |
//! | tap readable or writable (edge) | a pass that receives; one that transmits, if it was waiting for room |
//!
//! A pass that spent its budget kicks its own queue, so that it goes on after everybody else had a turn.

use super::{NetWorker, RECEIVE, TRANSMIT, worker::Frames, worker::Pause};
use crate::{
    Error,
    devices::virtio::{
        Activation, Interrupt,
        runner::{Command, Commands, Handle, commands},
    },
    ending::Ending,
    memory::Memory,
};
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use std::{os::fd::AsRawFd, sync::Arc};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::EventFd;

struct Active {
    queues: Vec<Queue>,
    interrupt: Arc<Interrupt>,
    memory: Memory,
}

/// The device thread's end.
pub struct NetRunner<F> {
    worker: NetWorker<F>,
    commands: Commands,
    /// One for each queue, written by KVM when the driver notifies, and by a pass that has more to do.
    kicks: Vec<EventFd>,
    active: Option<Active>,
    /// The tap had no room for the next frame.
    full: bool,
    ending: Ending,
}

/// Makes both ends, the device's and the device thread's. `kicks` has one eventfd for each queue.
pub fn pair<F: Frames + AsRawFd>(
    worker: NetWorker<F>,
    kicks: Vec<EventFd>,
    ending: Ending,
) -> Result<(Handle, NetRunner<F>), Error> {
    let (handle, commands) = commands()?;
    Ok((handle, NetRunner { worker, commands, kicks, active: None, full: false, ending }))
}

impl<F: Frames + AsRawFd> NetRunner<F> {
    const WAKE: u32 = u32::MAX;
    const TAP: u32 = u32::MAX - 1;
    /// Edges, since a tap with frames and no buffers for them would be ready all the time.
    const EDGES: EventSet = EventSet::IN.union(EventSet::OUT).union(EventSet::EDGE_TRIGGERED);

    fn obey(&mut self) -> Result<(), Error> {
        while let Some(command) = self.commands.next() {
            match command {
                Command::Activate(Activation { features, queues, interrupt, memory }) => {
                    self.worker.negotiated(features);
                    self.active = Some(Active { queues, interrupt, memory });
                    self.full = false;
                    // Edges and kicks from before are gone.
                    self.again(RECEIVE)?;
                    self.again(TRANSMIT)?;
                }
                Command::Sleep(reply) => {
                    let queues = self.active.take().map_or_else(Vec::new, |active| active.queues);
                    // Nobody waits any more only if the machine is ending.
                    let _ = reply.send(queues);
                }
            }
        }
        Ok(())
    }

    fn again(&self, queue: usize) -> Result<(), Error> {
        self.kicks
            .get(queue)
            .map_or(Ok(()), |kick| kick.write(1))
            .map_err(Error::io("wake the network device"))
    }

    fn pass(&mut self, index: usize, ops: &EventOps) -> Result<(), Error> {
        let Some(active) = &mut self.active else { return Ok(()) };
        let Some(queue) = active.queues.get_mut(index) else { return Ok(()) };
        let pass = match index {
            RECEIVE => self.worker.receive(queue, &active.memory),
            _ => self.worker.transmit(queue, &active.memory),
        }?;
        if pass.interrupt {
            active.interrupt.used_buffer().map_err(Error::io("interrupt the guest"))?;
        }
        match pass.pause {
            Pause::BudgetSpent => self.again(index)?,
            Pause::NotReady if index == TRANSMIT => {
                self.full = true;
                // Arms the edge anew, so that one from just before now is not missed.
                let tap = Events::with_data(&self.worker.frames, Self::TAP, Self::EDGES);
                ops.modify(tap).map_err(|e| Error::Device { device: "net", why: e.to_string() })?;
            }
            Pause::NotReady | Pause::RingEmpty => {}
        }
        Ok(())
    }

    fn heed(&mut self, events: Events, ops: &EventOps) -> Result<(), Error> {
        // A kick can be seen before the activation that came first, so commands go first always.
        match events.data() {
            Self::WAKE => {
                self.commands.clear();
                self.obey()
            }
            Self::TAP => {
                self.obey()?;
                self.pass(RECEIVE, ops)?;
                if self.full && events.event_set().contains(EventSet::OUT) {
                    self.full = false;
                    self.pass(TRANSMIT, ops)?;
                }
                Ok(())
            }
            index => {
                let index = index as usize;
                if let Some(kick) = self.kicks.get(index) {
                    let _ = kick.read();
                }
                self.obey()?;
                if index == TRANSMIT && self.full { Ok(()) } else { self.pass(index, ops) }
            }
        }
    }
}

impl<F: Frames + AsRawFd> MutEventSubscriber for NetRunner<F> {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        if let Err(error) = self.heed(events, ops) {
            self.active = None;
            self.ending.fault(error);
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        let own = [
            Events::with_data(self.commands.wake(), Self::WAKE, EventSet::IN),
            Events::with_data(&self.worker.frames, Self::TAP, Self::EDGES),
        ];
        let kicks =
            self.kicks.iter().zip(0..).map(|(kick, index)| Events::with_data(kick, index, EventSet::IN));
        for events in own.into_iter().chain(kicks) {
            if let Err(e) = ops.add(events) {
                self.ending.fault(Error::Device { device: "net", why: e.to_string() });
            }
        }
    }
}
