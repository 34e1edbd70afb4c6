//! Every command of this boot, by id. An id that was taken once is taken until the machine is gone.

use super::Spool;
use bivouac_protocol::agent::{Ended, Refusal, StartFailure, Stream};
use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::Rc,
};
use tokio::sync::{Notify, watch};

/// A command that was started, and what is known of it.
#[derive(Debug)]
pub struct Command {
    /// Of the leader; 0 when there never was one.
    pub pid: libc::pid_t,
    state: RefCell<Streams>,
    /// Rings at each change of `state`.
    bell: watch::Sender<()>,
    /// Someone wants it to end early.
    pub cancel: Notify,
}

#[derive(Debug, Default)]
pub struct Streams {
    stdout: Spool,
    stderr: Spool,
    pub ended: Option<Ended>,
}

impl Streams {
    pub fn spool(&mut self, stream: Stream) -> &mut Spool {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }

    pub fn spool_ref(&self, stream: Stream) -> &Spool {
        match stream {
            Stream::Stdout => &self.stdout,
            Stream::Stderr => &self.stderr,
        }
    }
}

impl Command {
    /// A command that could not be started: known like any other, so that whoever asks again hears the same.
    pub fn not_started(failure: StartFailure) -> Rc<Self> {
        let command = Self::new(0);
        command.change(|streams| {
            streams.stdout.close();
            streams.stderr.close();
            streams.ended = Some(Ended::not_started(failure));
        });
        command
    }

    pub fn new(pid: libc::pid_t) -> Rc<Self> {
        Rc::new(Self { pid, state: RefCell::default(), bell: watch::Sender::new(()), cancel: Notify::new() })
    }

    /// Changes what is known, and tells everybody who watches.
    pub fn change<T>(&self, change: impl FnOnce(&mut Streams) -> T) -> T {
        let result = change(&mut self.state.borrow_mut());
        self.bell.send_replace(());
        result
    }

    pub fn look<T>(&self, look: impl FnOnce(&Streams) -> T) -> T {
        look(&self.state.borrow())
    }

    /// To be taken before looking, so that no change in between is missed.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.bell.subscribe()
    }
}

/// What an id that was taken stands for.
#[derive(Debug)]
enum Entry {
    Known(Rc<Command>),
    Released,
}

#[derive(Debug, Default)]
pub struct Table {
    entries: RefCell<HashMap<Box<str>, Entry>>,
    known: Cell<usize>,
}

/// Commands that may be known and not released: each that runs takes a few descriptors of the agent's.
const KNOWN_MAX: usize = 4096;

impl Table {
    /// Whether a command with this id may be made.
    pub fn admit(&self, id: &str) -> Result<(), Refusal> {
        if self.entries.borrow().contains_key(id) {
            return Err(Refusal::Duplicate);
        }
        if self.known.get() >= KNOWN_MAX {
            return Err(Refusal::Busy {
                detail: format!("{KNOWN_MAX} commands are running or not yet released"),
            });
        }
        Ok(())
    }

    pub fn insert(&self, id: &str, command: Rc<Command>) {
        self.known.set(self.known.get().saturating_add(1));
        self.entries.borrow_mut().insert(id.into(), Entry::Known(command));
    }

    pub fn find(&self, id: &str) -> Result<Rc<Command>, Refusal> {
        match self.entries.borrow().get(id) {
            Some(Entry::Known(command)) => Ok(command.clone()),
            Some(Entry::Released) => Err(Refusal::Released),
            None => Err(Refusal::UnknownCommand),
        }
    }

    /// Forgets everything but the id. A command that has not ended stays known.
    pub fn release(&self, id: &str) {
        if let Some(entry) = self.entries.borrow_mut().get_mut(id)
            && matches!(entry, Entry::Known(command) if command.look(|streams| streams.ended.is_some()))
        {
            self.known.set(self.known.get().saturating_sub(1));
            *entry = Entry::Released;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bivouac_protocol::agent::StartFailureKind;

    fn failure() -> StartFailure {
        StartFailure { kind: StartFailureKind::NotFound, detail: String::new() }
    }

    #[test]
    fn an_id_is_taken_once_for_good() {
        let table = Table::default();
        assert_eq!(table.find("a").unwrap_err(), Refusal::UnknownCommand);
        table.admit("a").unwrap();
        table.insert("a", Command::new(7));
        assert_eq!(table.admit("a"), Err(Refusal::Duplicate));
        table.release("a");
        assert_eq!(table.find("a").unwrap().pid, 7, "a running command cannot be released");
        table.find("a").unwrap().change(|streams| streams.ended = Some(Ended::not_started(failure())));
        table.release("a");
        assert_eq!(table.admit("a"), Err(Refusal::Duplicate));
        assert_eq!(table.find("a").unwrap_err(), Refusal::Released);
    }
}
