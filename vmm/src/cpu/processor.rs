//! A virtual processor's thread, and the handle by which it is paused, saved and let go on.
//!
//! ```text
//!  running ──pause──▶ paused ──resume──▶ running        save: paused only
//! ```
//!
//! An order is put in the thread's channel and then the thread is signalled. The signal's handler sets the immediate
//! exit of the processor it interrupts, so that an order which arrives a moment before the guest is entered still gets
//! heard: `KVM_RUN` then returns at once.

use super::{
    state::VcpuState,
    vcpu::{Exit, Vcpu},
};
use crate::{Error, ending::Ending, jail::seccomp};
use std::{
    cell::Cell,
    os::unix::thread::JoinHandleExt,
    ptr,
    sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    thread::{self, JoinHandle},
};

/// Stack of a processor's thread. It handles one exit at a time and calls nothing deep.
const STACK: usize = 128 << 10;

enum Order {
    Pause(SyncSender<Result<(), Error>>),
    Save(SyncSender<Result<Box<VcpuState>, Error>>),
    Resume,
}

/// The handle, used by the control thread.
pub struct Processor {
    id: u8,
    orders: Sender<Order>,
    thread: JoinHandle<()>,
}

thread_local! {
    /// Where the signal's handler finds the processor of the thread it runs on.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
}

fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN()
}

extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let byte = IMMEDIATE_EXIT.get();
    if !byte.is_null() {
        // SAFETY: set by this thread to a byte of the page its processor shares with KVM, which lives as long as the
        // thread's loop does, and reset before that ends. Volatile: KVM reads it behind the compiler's back.
        unsafe { byte.write_volatile(1) };
    }
}

impl Processor {
    /// Starts the thread, paused: the guest runs from [`Processor::resume`] on.
    pub fn start(vcpu: Vcpu, ending: Ending) -> Result<Self, Error> {
        // Once more for each processor changes nothing.
        vmm_sys_util::signal::register_signal_handler(kick_signal(), on_kick)
            .map_err(|e| Error::Io { what: "install the processors' signal handler", why: e.into() })?;
        let (orders, inbox) = channel();
        let id = vcpu.id();
        let thread = thread::Builder::new()
            .name(format!("vcpu{id}"))
            .stack_size(STACK)
            .spawn(move || {
                let exit = match seccomp::enter(seccomp::Thread::Vcpu) {
                    Ok(()) => live(vcpu, &inbox),
                    Err(error) => Exit::Fault(error),
                };
                ending.exit(exit);
            })
            .map_err(Error::io("start a processor's thread"))?;
        Ok(Self { id, orders, thread })
    }

    /// Asks the processor to stop; [`Pausing::wait`] says when it has. Several are asked first and waited for then.
    pub fn pause(&self) -> Result<Pausing, Error> {
        let (reply, stopped) = sync_channel(1);
        self.order(Order::Pause(reply))?;
        // SAFETY: the handle is not joined, so the thread's id is valid, whether or not it has ended.
        unsafe { libc::pthread_kill(self.thread.as_pthread_t(), kick_signal()) };
        Ok(Pausing { id: self.id, stopped })
    }

    /// Of a paused processor only.
    pub fn save(&self) -> Result<VcpuState, Error> {
        let (reply, saved) = sync_channel(1);
        self.order(Order::Save(reply))?;
        saved.recv().map_err(|_| gone(self.id))?.map(|state| *state)
    }

    pub fn resume(&self) -> Result<(), Error> {
        self.order(Order::Resume)
    }

    fn order(&self, order: Order) -> Result<(), Error> {
        self.orders.send(order).map_err(|_| gone(self.id))
    }
}

fn gone(id: u8) -> Error {
    Error::Vcpu { vcpu: id, why: "its thread has ended".into() }
}

/// A processor that was asked to stop.
pub struct Pausing {
    id: u8,
    stopped: Receiver<Result<(), Error>>,
}

impl Pausing {
    pub fn wait(self) -> Result<(), Error> {
        self.stopped.recv().map_err(|_| gone(self.id))?
    }
}

/// The thread's life: until the machine ends.
fn live(mut vcpu: Vcpu, inbox: &Receiver<Order>) -> Exit {
    IMMEDIATE_EXIT.set(vcpu.immediate_exit());
    let exit = run(&mut vcpu, inbox);
    IMMEDIATE_EXIT.set(ptr::null_mut());
    exit
}

fn run(vcpu: &mut Vcpu, inbox: &Receiver<Order>) -> Exit {
    let mut held = true;
    loop {
        // Cleared before the channel is looked at: an order that comes later sets it again.
        vcpu.set_immediate_exit(false);
        let order = if held { inbox.recv().ok() } else { inbox.try_recv().ok() };
        match order {
            Some(Order::Pause(reply)) => {
                held = true;
                let _ = reply.send(vcpu.settle());
            }
            Some(Order::Save(reply)) => {
                let _ = reply.send(vcpu.save().map(Box::new));
            }
            Some(Order::Resume) => held = false,
            // The control thread is gone, and the process with it.
            None if held => return Exit::Shutdown,
            None => {
                if let Some(exit) = vcpu.step() {
                    return exit;
                }
            }
        }
    }
}
