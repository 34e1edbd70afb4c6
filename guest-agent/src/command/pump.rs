//! From a command's pipe into its spool.
//!
//! Every byte that was written before the leader's end arrives, however slowly the daemon reads. Bytes that a
//! surviving child writes later are taken for [`DRAIN_MS`] and then thrown away, for as long as the child lives: a
//! background server must not die of a pipe that nobody reads.

use super::table::{Command, Streams};
use bivouac_protocol::{
    agent::{DRAIN_MS, Stream},
    frame::MAX_CHUNK,
};
use rustix::io::{Errno, ioctl_fionread};
use std::{os::fd::OwnedFd, rc::Rc, time::Duration};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch,
    time::{Instant, timeout_at},
};

/// Set once, to the moment the leader ended.
pub type LeaderEnd = watch::Receiver<Option<Instant>>;

pub async fn pump(command: Rc<Command>, stream: Stream, pipe: AsyncFd<OwnedFd>, mut end: LeaderEnd) {
    let mut buffer = vec![0; MAX_CHUNK];
    collect(&command, stream, &pipe, &mut end, &mut buffer).await;
    command.change(|streams| streams.spool(stream).close());
    // What comes now is nobody's.
    while let Ok(1..) = read(&pipe, &mut buffer, MAX_CHUNK, None).await {}
}

async fn collect(
    command: &Rc<Command>,
    stream: Stream,
    pipe: &AsyncFd<OwnedFd>,
    end: &mut LeaderEnd,
    buffer: &mut [u8],
) {
    // While the leader lives, every byte counts.
    loop {
        if end.borrow().is_some() {
            break;
        }
        let room = tokio::select! {
            room = room(command, stream) => room,
            _ = end.changed() => break,
        };
        tokio::select! {
            got = read(pipe, buffer, room, None) => match got {
                Ok(n @ 1..) => push(command, stream, buffer, n),
                _ => return,
            },
            _ = end.changed() => break,
        }
    }
    // What was in the pipe at the leader's end may be its own, and counts too.
    let mut owed = ioctl_fionread(pipe.get_ref()).map_or(0, |bytes| usize::try_from(bytes).unwrap_or(0));
    while owed > 0 {
        let room = room(command, stream).await;
        match read(pipe, buffer, room.min(owed), None).await {
            Ok(n @ 1..) => {
                owed = owed.saturating_sub(n);
                push(command, stream, buffer, n);
            }
            _ => return,
        }
    }
    // Then a child's, for a moment.
    let deadline = Instant::now() + Duration::from_millis(DRAIN_MS);
    loop {
        let Ok(room) = timeout_at(deadline, room(command, stream)).await else { return };
        match read(pipe, buffer, room, Some(deadline)).await {
            Ok(n @ 1..) if Instant::now() < deadline => push(command, stream, buffer, n),
            _ => return,
        }
    }
}

fn push(command: &Command, stream: Stream, buffer: &[u8], n: usize) {
    command.change(|streams: &mut Streams| streams.spool(stream).push(buffer.get(..n).unwrap_or_default()));
}

/// Waits until the spool takes something, and says how much.
async fn room(command: &Command, stream: Stream) -> usize {
    let mut changes = command.changes();
    loop {
        match command.look(|streams| streams.spool_ref(stream).room()) {
            0 => {
                let _ = changes.changed().await;
            }
            room => return room,
        }
    }
}

/// Up to `limit` bytes; 0 at the end of the file. A deadline that passes is an error like any other.
async fn read(
    pipe: &AsyncFd<OwnedFd>,
    buffer: &mut [u8],
    limit: usize,
    deadline: Option<Instant>,
) -> Result<usize, Errno> {
    let limit = limit.min(buffer.len());
    let buffer = buffer.get_mut(..limit).unwrap_or_default();
    loop {
        let ready = pipe.ready(Interest::READABLE);
        let ready = match deadline {
            Some(deadline) => timeout_at(deadline, ready).await.map_err(|_| Errno::TIMEDOUT)?,
            None => ready.await,
        };
        let mut ready = ready.map_err(|_| Errno::IO)?;
        match rustix::io::read(pipe.get_ref(), &mut *buffer) {
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
