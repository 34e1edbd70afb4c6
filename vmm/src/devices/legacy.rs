//! The two port devices a PC without firmware still needs: a keyboard controller that only knows how to reset the
//! machine, and, when asked for, a serial console.

use crate::{Error, bus::ABSENT, bus::Registers};
use std::{
    io::{self, Write},
    sync::Mutex,
};
use vm_superio::{I8042Device, Serial, Trigger, serial::NoEvents};
use vmm_sys_util::eventfd::EventFd;

/// An eventfd as the trigger these devices call for.
pub struct Line(pub EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Keyboard controller at ports 0x60 to 0x64. The kernel's `reboot=k` writes 0xfe to its command port.
pub struct ResetController(Mutex<I8042Device<Line>>);

impl ResetController {
    pub fn new(reset: EventFd) -> Self {
        Self(Mutex::new(I8042Device::new(Line(reset))))
    }
}

impl Registers for ResetController {
    fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        single(data, |byte| {
            *byte = lock(&self.0).read(u8::try_from(offset).unwrap_or(u8::MAX));
            Ok(())
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let [byte] = data else { return Ok(()) };
        lock(&self.0)
            .write(u8::try_from(offset).unwrap_or(u8::MAX), *byte)
            .map_err(Error::io("signal a reset by the guest"))
    }
}

/// A 16550 serial port that copies what the guest prints to the monitor's standard error. Off unless asked for.
pub struct Console(Mutex<Serial<Line, NoEvents, Bounded>>);

impl Console {
    /// Bytes a guest may print in all; the rest is dropped, so that no guest fills the host's disk.
    const LIMIT: u64 = 1 << 20;

    pub fn new(interrupt: EventFd) -> Self {
        Self(Mutex::new(Serial::new(Line(interrupt), Bounded { left: Self::LIMIT })))
    }
}

impl Registers for Console {
    fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        single(data, |byte| {
            *byte = lock(&self.0).read(u8::try_from(offset).unwrap_or(u8::MAX));
            Ok(())
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        if let [byte] = data {
            // What fails here is the host's log, which is no reason to end the guest.
            let _ = lock(&self.0).write(u8::try_from(offset).unwrap_or(u8::MAX), *byte);
        }
        Ok(())
    }
}

struct Bounded {
    left: u64,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.left > 0 {
            self.left = self.left.saturating_sub(bytes.len() as u64);
            io::stderr().write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Both devices have one-byte registers: any other width reads as nothing there.
fn single(data: &mut [u8], read: impl FnOnce(&mut u8) -> Result<(), Error>) -> Result<(), Error> {
    match data {
        [byte] => read(byte),
        wide => {
            wide.fill(ABSENT);
            Ok(())
        }
    }
}

/// A poisoned lock means a vCPU thread panicked, and `panic = abort` has ended the process by then.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
