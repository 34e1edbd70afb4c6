//! One output stream of one command, on disk.
//!
//! A file holds a header, the first half of the limit, and a ring with the last half, so that any amount of output takes
//! constant space and every kept byte has its absolute offset:
//!
//! ```text
//!  0        64                64 + head          64 + head + tail
//!  | header | bytes [0, head) | ring of the rest |
//! ```
//!
//! It stays true through a kill -9 of the daemon at any instant: data is written before the header's `total` moves, and
//! before a write can overwrite bytes in the ring, the header's `reserved` says so. Appending the same bytes at the same
//! offset again changes nothing. What must never happen here: growth with the amount of output, or a byte returned at
//! an offset it was not written at.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const MAGIC: [u8; 8] = *b"BIVSPOOL";
const VERSION: u64 = 1;
const HEADER: u64 = 64;
const AT_LIMIT: u64 = 16;
const AT_TOTAL: u64 = 24;
const AT_RESERVED: u64 = 32;

/// What of a stream is kept: `[0, head_end)` and `[tail_start, total)`; the two meet where nothing was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub total: u64,
    pub head_end: u64,
    pub tail_start: u64,
}

impl Extent {
    pub const EMPTY: Extent = Extent { total: 0, head_end: 0, tail_start: 0 };

    /// Bytes between head and tail that were not kept.
    pub fn dropped(&self) -> u64 {
        self.tail_start.saturating_sub(self.head_end)
    }

    /// The first kept offset at or after `offset`.
    pub fn next_kept(&self, offset: u64) -> u64 {
        if offset >= self.head_end && offset < self.tail_start { self.tail_start } else { offset }
    }
}

#[derive(Debug)]
pub struct Spool {
    file: File,
    limit: u64,
    total: u64,
    reserved: u64,
}

impl Spool {
    /// Opens the stream's file, or makes an empty one. A limit in the file wins over the one given.
    pub fn open_or_create(path: &Path, limit: u64) -> io::Result<Self> {
        if let Some(spool) = Self::open(path)? {
            return Ok(spool);
        }
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut spool = Self { file, limit: limit.max(2), total: 0, reserved: 0 };
        // The magic goes last: a file without it is one whose making was cut short, and is made again.
        spool.put(8, VERSION)?;
        spool.put(AT_LIMIT, spool.limit)?;
        spool.set_reserved(0)?;
        spool.set_total(0)?;
        spool.file.write_all_at(&MAGIC, 0)?;
        Ok(spool)
    }

    /// Opens the stream's file. None: there was no output yet.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let mut magic = [0; 8];
        match file.read_exact_at(&mut magic, 0) {
            Ok(()) if magic == MAGIC => {}
            Ok(()) if magic == [0; 8] => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(e) => return Err(e),
            Ok(()) => return Err(corrupt(path, "it is not an output file")),
        }
        let mut spool = Self { file, limit: 0, total: 0, reserved: 0 };
        if spool.get(8)? != VERSION {
            return Err(corrupt(path, "it was written by another version"));
        }
        spool.limit = spool.get(AT_LIMIT)?;
        if spool.limit < 2 {
            return Err(corrupt(path, "its limit is below 2"));
        }
        spool.refresh()?;
        Ok(Some(spool))
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    fn head(&self) -> u64 {
        self.limit / 2
    }

    fn tail(&self) -> u64 {
        self.limit.saturating_sub(self.head())
    }

    pub fn extent(&self) -> Extent {
        let head_end = self.total.min(self.head());
        let written_to = self.total.max(self.reserved);
        let tail_start = written_to.saturating_sub(self.tail()).max(head_end).min(self.total.max(head_end));
        Extent { total: self.total, head_end, tail_start }
    }

    /// Reads the header again: another descriptor may be appending.
    pub fn refresh(&mut self) -> io::Result<()> {
        // `total` first: a reservation read later is at least as new, so the extent is never too large.
        self.total = self.get(AT_TOTAL)?;
        self.reserved = self.get(AT_RESERVED)?;
        Ok(())
    }

    /// Appends `data`, whose first byte is at the absolute `offset`. Bytes already recorded are skipped; a gap is refused.
    pub fn append(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let known = self.total.checked_sub(offset).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("output at {offset} leaves a gap after {}", self.total),
            )
        })?;
        let fresh = usize::try_from(known).ok().and_then(|known| data.get(known..)).unwrap_or_default();
        if fresh.is_empty() {
            return Ok(());
        }
        let end =
            self.total.checked_add(len(fresh)).ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        if end > self.limit && end > self.reserved {
            self.set_reserved(end)?;
        }
        self.write_region(self.total, fresh)?;
        self.set_total(end)
    }

    /// Up to `max` kept bytes at `offset`, without crossing the gap. Empty at the end, or inside the gap.
    pub fn read(&mut self, offset: u64, max: usize) -> io::Result<Vec<u8>> {
        // An append may overtake a read of the ring: look again afterwards, and drop what was overwritten meanwhile.
        self.refresh()?;
        let before = self.extent();
        let end = if offset < before.head_end {
            before.head_end
        } else if offset >= before.tail_start {
            before.total
        } else {
            return Ok(Vec::new());
        };
        let want = end.saturating_sub(offset).min(len_of(max));
        let data = self.read_region(offset, want)?;
        self.refresh()?;
        let after = self.extent();
        if offset >= after.head_end && offset < after.tail_start { Ok(Vec::new()) } else { Ok(data) }
    }

    /// What is kept, as of one moment, with the bytes of head and tail.
    pub fn snapshot(&mut self) -> io::Result<(Extent, Vec<u8>, Vec<u8>)> {
        self.refresh()?;
        let mut extent = self.extent();
        let head = self.read_region(0, extent.head_end)?;
        let mut tail = self.read_region(extent.tail_start, extent.total.saturating_sub(extent.tail_start))?;
        // What an append has overwritten while this read is not what it was.
        self.refresh()?;
        let overtaken = self.extent().tail_start.saturating_sub(extent.tail_start).min(len(&tail));
        tail.drain(..usize::try_from(overtaken).unwrap_or(0));
        extent.tail_start = extent.tail_start.saturating_add(overtaken);
        Ok((extent, head, tail))
    }

    /// Where `offset` lies in the file, and how many bytes follow it without a break.
    fn place(&self, offset: u64) -> (u64, u64) {
        let (head, tail) = (self.head(), self.tail());
        if offset < head {
            return (HEADER.saturating_add(offset), head.saturating_sub(offset));
        }
        let at = offset.saturating_sub(head).checked_rem(tail).unwrap_or(0);
        (HEADER.saturating_add(head).saturating_add(at), tail.saturating_sub(at))
    }

    fn write_region(&self, mut offset: u64, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let (at, room) = self.place(offset);
            let (now, later) =
                data.split_at_checked(usize::try_from(room).unwrap_or(usize::MAX)).unwrap_or((data, &[]));
            self.file.write_all_at(now, at)?;
            offset = offset.saturating_add(len(now));
            data = later;
        }
        Ok(())
    }

    fn read_region(&self, mut offset: u64, mut want: u64) -> io::Result<Vec<u8>> {
        let mut out = Vec::with_capacity(usize::try_from(want).unwrap_or(0));
        while want > 0 {
            let (at, room) = self.place(offset);
            let now = want.min(room);
            let start = out.len();
            out.resize(start.saturating_add(usize::try_from(now).unwrap_or(0)), 0);
            if let Some(piece) = out.get_mut(start..) {
                self.file.read_exact_at(piece, at)?;
            }
            offset = offset.saturating_add(now);
            want = want.saturating_sub(now);
        }
        Ok(out)
    }

    fn set_total(&mut self, total: u64) -> io::Result<()> {
        self.put(AT_TOTAL, total)?;
        self.total = total;
        Ok(())
    }

    fn set_reserved(&mut self, reserved: u64) -> io::Result<()> {
        self.put(AT_RESERVED, reserved)?;
        self.reserved = reserved;
        Ok(())
    }

    fn put(&self, at: u64, value: u64) -> io::Result<()> {
        self.file.write_all_at(&value.to_le_bytes(), at)
    }

    fn get(&self, at: u64) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(u64::from_le_bytes(bytes))
    }
}

fn len(data: &[u8]) -> u64 {
    len_of(data.len())
}

fn len_of(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}

fn corrupt(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("output file {} refused: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(range: std::ops::Range<u64>) -> Vec<u8> {
        range.map(|i| u8::try_from(i.wrapping_mul(31) % 251).unwrap()).collect()
    }

    fn everything(spool: &mut Spool) -> (Vec<u8>, Vec<u8>) {
        let (_, head, tail) = spool.snapshot().unwrap();
        (head, tail)
    }

    #[test]
    fn output_below_the_limit_is_kept_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut spool = Spool::open_or_create(&dir.path().join("stdout"), 1000).unwrap();
        spool.append(0, &bytes(0..900)).unwrap();
        let (head, tail) = everything(&mut spool);
        assert_eq!([head, tail].concat(), bytes(0..900));
        assert_eq!(spool.extent().dropped(), 0);
    }

    #[test]
    fn output_above_the_limit_keeps_head_and_tail_in_constant_space() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout");
        let mut spool = Spool::open_or_create(&path, 1000).unwrap();
        for start in (0..100_000).step_by(700) {
            spool.append(start, &bytes(start..start + 700)).unwrap();
        }
        let total = spool.total();
        let (head, tail) = everything(&mut spool);
        assert_eq!(head, bytes(0..500));
        assert_eq!(tail, bytes(total - 500..total));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), HEADER + 1000);
        assert_eq!(spool.read(600, 10).unwrap(), Vec::<u8>::new());
    }

    #[test]
    fn a_gap_is_refused_and_a_repeat_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut spool = Spool::open_or_create(&dir.path().join("stdout"), 1000).unwrap();
        spool.append(0, b"hello").unwrap();
        spool.append(0, b"hello wor").unwrap();
        spool.append(3, b"lo").unwrap();
        assert!(spool.append(10, b"x").is_err());
        assert_eq!(spool.read(0, 100).unwrap(), b"hello wor");
    }

    #[test]
    fn a_file_whose_making_was_cut_short_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout");
        std::fs::write(&path, [0; 40]).unwrap();
        let mut spool = Spool::open_or_create(&path, 1000).unwrap();
        spool.append(0, b"x").unwrap();
        assert_eq!(Spool::open(&path).unwrap().unwrap().total(), 1);
    }

    /// Every prefix of the writes that one append makes is a state a kill can leave behind.
    #[test]
    fn a_kill_between_any_two_writes_leaves_only_true_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout");
        let mut spool = Spool::open_or_create(&path, 100).unwrap();
        spool.append(0, &bytes(0..190)).unwrap();
        let fresh = bytes(190..220);

        // Killed after the reservation and the data, before `total`.
        spool.set_reserved(220).unwrap();
        spool.write_region(190, &fresh).unwrap();

        let mut after = Spool::open(&path).unwrap().unwrap();
        let extent = after.extent();
        assert_eq!((extent.total, extent.tail_start), (190, 170));
        assert_eq!(after.read(170, 100).unwrap(), bytes(170..190));
        // Taken up again from `total`, it is whole.
        after.append(190, &fresh).unwrap();
        assert_eq!(after.read(170, 100).unwrap(), bytes(170..220));
    }

    #[test]
    fn a_reader_beside_a_writer_sees_true_bytes_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stdout");
        let mut writer = Spool::open_or_create(&path, 4096).unwrap();
        let mut reader = Spool::open(&path).unwrap().unwrap();
        let writing = std::thread::spawn(move || {
            for start in (0..2_000_000).step_by(500) {
                writer.append(start, &bytes(start..start + 500)).unwrap();
            }
        });
        while !writing.is_finished() {
            let (extent, head, tail) = reader.snapshot().unwrap();
            assert_eq!(head, bytes(0..extent.head_end));
            assert_eq!(tail, bytes(extent.tail_start..extent.total));
        }
        writing.join().unwrap();
    }

    proptest! {
        #[test]
        fn every_kept_byte_is_the_one_written_there(
            limit in 2_u64..300,
            pieces in proptest::collection::vec(1_u64..120, 0..30),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let mut spool = Spool::open_or_create(&dir.path().join("s"), limit).unwrap();
            let mut at = 0;
            for piece in pieces {
                spool.append(at, &bytes(at..at + piece)).unwrap();
                at += piece;
            }
            let extent = spool.extent();
            prop_assert_eq!(extent.total, at);
            prop_assert!(extent.dropped() == at.saturating_sub(limit));
            prop_assert_eq!(spool.read(0, usize::MAX).unwrap().len() as u64 >= extent.head_end, true);
            let tail = spool.read(extent.tail_start, usize::MAX).unwrap();
            prop_assert_eq!(tail, bytes(extent.tail_start..at));
        }
    }
}
