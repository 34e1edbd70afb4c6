//! The glue between a worker and the world: which descriptors wake it, and when the driver is told.
//!
//! Queues reach the device thread as a message ([`Handle::activate`]) and leave it again on [`Handle::sleep`], which
//! returns only after the worker has let go: past that point nothing of theirs is in flight, as a fact of ownership.

use super::{Activation, Interrupt};
use crate::{Error, ending::Ending, memory::Memory};
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use std::sync::{
    Arc,
    atomic::Ordering,
    mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Ring processing of one device: pure over guest memory and what it was made with.
pub trait Worker: Send {
    fn name(&self) -> &'static str;
    /// Serves one request and returns how many bytes were written for the driver to read. An error ends the machine.
    fn serve(&mut self, memory: &Memory, chain: DescriptorChain<&Memory>) -> Result<u32, Error>;
}

/// What a device asks of the main thread.
pub enum Command {
    Activate(Activation),
    /// To be answered with the queues.
    Sleep(SyncSender<Vec<Queue>>),
}

/// Where the main thread hears of it.
pub struct Commands {
    receiver: Receiver<Command>,
    wake: EventFd,
}

impl Commands {
    /// Readable when there are commands.
    pub fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// The wake has been heard.
    pub fn clear(&self) {
        let _ = self.wake.read();
    }

    pub fn next(&self) -> Option<Command> {
        self.receiver.try_recv().ok()
    }
}

/// Makes a device's end and the end that obeys it.
pub fn commands() -> Result<(Handle, Commands), Error> {
    let wake = EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?;
    let (commands, receiver) = channel();
    let handle = Handle { commands, wake: wake.try_clone().map_err(Error::io("copy an eventfd"))? };
    Ok((handle, Commands { receiver, wake }))
}

/// The device's end, used on vCPU threads.
pub struct Handle {
    commands: Sender<Command>,
    wake: EventFd,
}

impl Handle {
    pub fn activate(&self, activation: Activation) -> Result<(), Error> {
        self.send(Command::Activate(activation))
    }

    /// Stops the worker and takes the queues back; empty when it was not active.
    pub fn sleep(&self) -> Result<Vec<Queue>, Error> {
        let (reply, queues) = sync_channel(1);
        self.send(Command::Sleep(reply))?;
        queues.recv().map_err(|_| stopped())
    }

    fn send(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| stopped())?;
        self.wake.write(1).map_err(Error::io("wake the device thread"))
    }
}

fn stopped() -> Error {
    Error::Device { device: "device thread", why: "it has stopped".into() }
}

struct Active {
    queues: Vec<Queue>,
    interrupt: Arc<Interrupt>,
    memory: Memory,
}

/// The device thread's end.
pub struct Runner<W> {
    worker: W,
    commands: Commands,
    /// One for each queue, written by KVM when the driver notifies.
    kicks: Vec<EventFd>,
    active: Option<Active>,
    ending: Ending,
}

/// Makes both ends. `kicks` has one eventfd for each queue.
pub fn pair<W: Worker>(worker: W, kicks: Vec<EventFd>, ending: Ending) -> Result<(Handle, Runner<W>), Error> {
    let (handle, commands) = commands()?;
    Ok((handle, Runner { worker, commands, kicks, active: None, ending }))
}

impl<W: Worker> Runner<W> {
    const WAKE: u32 = u32::MAX;

    fn obey(&mut self) -> Result<(), Error> {
        while let Some(command) = self.commands.next() {
            match command {
                Command::Activate(Activation { queues, interrupt, memory, .. }) => {
                    self.active = Some(Active { queues, interrupt, memory });
                    self.serve_all()?;
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

    /// What was notified while nobody served it must not wait for the next notification: with event indexes the driver
    /// may have announced all it will.
    fn serve_all(&mut self) -> Result<(), Error> {
        (0..self.kicks.len()).try_for_each(|index| self.serve_queue(index))
    }

    fn serve_queue(&mut self, index: usize) -> Result<(), Error> {
        let Some(active) = &mut self.active else { return Ok(()) };
        let Some(queue) = active.queues.get_mut(index) else { return Ok(()) };
        let drained = drain(&mut self.worker, queue, &active.memory)?;
        if drained.interrupt {
            active.interrupt.used_buffer().map_err(Error::io("interrupt the guest"))?;
        }
        match self.kicks.get(index) {
            Some(kick) if drained.more => kick.write(1).map_err(Error::io("wake the device thread")),
            _ => Ok(()),
        }
    }
}

/// Requests served in a row, at most. A guest that adds them as fast as they are served would otherwise keep the thread from
/// every other device, and from the daemon's word to stop.
pub const BUDGET: usize = 256;

/// What came of a look at a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    /// The driver wants to hear of it.
    pub interrupt: bool,
    /// The budget was spent, and there may be more.
    pub more: bool,
}

/// Serves what is in the ring. Between two looks at it notifications are turned on, so that a request that arrives after
/// the last look is announced.
pub fn drain<W: Worker>(worker: &mut W, queue: &mut Queue, memory: &Memory) -> Result<Drained, Error> {
    let device = worker.name();
    let broken = |e: virtio_queue::Error| Error::Guest { device, why: e.to_string() };
    let mut left = BUDGET;
    'budget: while left > 0 {
        queue.disable_notification(memory).map_err(broken)?;
        // `iter` refuses an available index further ahead than the ring is long; a chain that does not come out of
        // it at all (a head beyond the table) ends the iteration, which `enable_notification` would repeat for ever.
        let before = queue.next_avail();
        let announced = queue.avail_idx(memory, Ordering::Acquire).map_err(broken)?.0 != before;
        while let Some(chain) = queue.iter(memory).map_err(broken)?.next() {
            let head = chain.head_index();
            let written = worker.serve(memory, chain)?;
            queue.add_used(memory, head, written).map_err(broken)?;
            left = left.saturating_sub(1);
            if left == 0 {
                break 'budget;
            }
        }
        if !queue.enable_notification(memory).map_err(broken)? {
            break;
        }
        if announced && queue.next_avail() == before {
            return Err(Error::Guest { device, why: "a ring entry names no descriptor".into() });
        }
    }
    let interrupt = left < BUDGET && queue.needs_notification(memory).map_err(broken)?;
    Ok(Drained { interrupt, more: left == 0 })
}

impl<W: Worker> MutEventSubscriber for Runner<W> {
    fn process(&mut self, events: Events, _: &mut EventOps) {
        // A kick can be seen before the activation that came first, so commands go first always.
        let data = events.data();
        let result = if data == Self::WAKE {
            self.commands.clear();
            self.obey()
        } else {
            let index = data as usize;
            if let Some(kick) = self.kicks.get(index) {
                let _ = kick.read();
            }
            self.obey().and_then(|()| self.serve_queue(index))
        };
        if let Err(error) = result {
            self.active = None;
            self.ending.fault(error);
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        let wake = Events::with_data(self.commands.wake(), Self::WAKE, EventSet::IN);
        let kicks =
            self.kicks.iter().zip(0..).map(|(kick, index)| Events::with_data(kick, index, EventSet::IN));
        for events in std::iter::once(wake).chain(kicks) {
            if let Err(e) = ops.add(events) {
                self.ending.fault(Error::Device { device: self.worker.name(), why: e.to_string() });
            }
        }
    }
}
