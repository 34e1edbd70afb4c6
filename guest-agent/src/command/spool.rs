//! What a command wrote to one stream and the daemon has not acknowledged, by absolute offset.
//!
//! Bounded: when it is full, the pipe is not read and the command waits in `write(2)`, so nothing is ever dropped here.

use bivouac_protocol::{agent::WINDOW, frame::MAX_CHUNK};
use std::collections::VecDeque;

#[derive(Debug, Default)]
pub struct Spool {
    bytes: VecDeque<u8>,
    /// Offset of the first byte kept: everything before it was acknowledged.
    start: u64,
    /// No byte will be added.
    closed: bool,
}

impl Spool {
    /// Offset behind the last byte: how many the command wrote so far.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes.len() as u64)
    }

    /// Bytes that may be added now.
    pub fn room(&self) -> usize {
        usize::try_from(WINDOW.saturating_sub(self.bytes.len() as u64)).unwrap_or(0)
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    pub fn close(&mut self) {
        self.closed = true;
    }

    pub fn closed(&self) -> bool {
        self.closed
    }

    /// The next run of bytes from `offset` on, at most one chunk, with the offset it really starts at: an offset below
    /// what is kept starts at what is kept.
    pub fn read(&self, offset: u64) -> (u64, Vec<u8>) {
        let from = offset.max(self.start).min(self.end());
        let skip = usize::try_from(from.saturating_sub(self.start)).unwrap_or(usize::MAX);
        (from, self.bytes.iter().skip(skip).take(MAX_CHUNK).copied().collect())
    }

    /// Forgets everything below `offset`.
    pub fn acknowledge(&mut self, offset: u64) {
        let done = offset.min(self.end()).saturating_sub(self.start);
        self.bytes.drain(..usize::try_from(done).unwrap_or(0).min(self.bytes.len()));
        self.start = self.start.saturating_add(done);
        if self.bytes.is_empty() {
            self.bytes.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_follows_absolute_offsets_across_acknowledgements() {
        let mut spool = Spool::default();
        spool.push(b"hello world");
        assert_eq!(spool.read(6), (6, b"world".to_vec()));
        spool.acknowledge(6);
        assert_eq!(spool.read(0), (6, b"world".to_vec()));
        assert_eq!(spool.read(99), (11, Vec::new()));
        spool.acknowledge(3);
        spool.acknowledge(u64::MAX);
        assert_eq!((spool.end(), spool.read(0).1.len()), (11, 0));
        spool.push(b"!");
        assert_eq!(spool.read(11), (11, b"!".to_vec()));
    }

    #[test]
    fn a_full_window_has_no_room_until_it_is_acknowledged() {
        let mut spool = Spool::default();
        spool.push(&vec![0; WINDOW as usize]);
        assert_eq!(spool.room(), 0);
        spool.acknowledge(10);
        assert_eq!(spool.room(), 10);
    }
}
