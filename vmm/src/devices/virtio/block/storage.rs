//! What a disk's bytes are kept in: a file, and in tests whatever fails in the way that is looked at.

use std::{fs::File, io, os::fd::AsRawFd};

/// Bytes at offsets. The caller has checked every range against the disk's size.
pub trait Storage: Send {
    /// Reads into `vectors` from `offset` on; like `preadv`, it may stop early, and at the end gives 0.
    fn read(&mut self, vectors: &[libc::iovec], offset: u64) -> io::Result<usize>;
    /// Writes from `vectors`; like `pwritev`, it may stop early.
    fn write(&mut self, vectors: &[libc::iovec], offset: u64) -> io::Result<usize>;
    /// Returns once everything written before is on the medium.
    fn flush(&mut self) -> io::Result<()>;
}

impl Storage for File {
    fn read(&mut self, vectors: &[libc::iovec], offset: u64) -> io::Result<usize> {
        let (count, offset) = arguments(vectors, offset)?;
        // SAFETY: the worker's vectors are guest memory, mapped for as long as the machine lives, and the kernel is the
        // only one that reads or writes through these addresses: no Rust reference to that memory exists.
        outcome(unsafe { libc::preadv(self.as_raw_fd(), vectors.as_ptr(), count, offset) })
    }

    fn write(&mut self, vectors: &[libc::iovec], offset: u64) -> io::Result<usize> {
        let (count, offset) = arguments(vectors, offset)?;
        // SAFETY: as above, and the kernel only reads.
        outcome(unsafe { libc::pwritev(self.as_raw_fd(), vectors.as_ptr(), count, offset) })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}

fn arguments(vectors: &[libc::iovec], offset: u64) -> io::Result<(libc::c_int, libc::off_t)> {
    let count = libc::c_int::try_from(vectors.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    Ok((count, libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?))
}

fn outcome(moved: isize) -> io::Result<usize> {
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

/// Moves every byte, in as many calls as it takes.
pub fn move_all(
    storage: &mut impl Storage,
    start: u64,
    mut vectors: &mut [libc::iovec],
    to_guest: bool,
) -> io::Result<()> {
    let mut offset = start;
    while !vectors.is_empty() {
        let moved = if to_guest { storage.read(vectors, offset) } else { storage.write(vectors, offset) };
        match moved {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => {
                offset = offset.saturating_add(bytes as u64);
                vectors = advance(vectors, bytes);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// What is left of `vectors` once their first `bytes` bytes are done.
pub(super) fn advance(vectors: &mut [libc::iovec], mut bytes: usize) -> &mut [libc::iovec] {
    let mut whole: usize = 0;
    for vector in vectors.iter() {
        let Some(rest) = bytes.checked_sub(vector.iov_len) else { break };
        bytes = rest;
        whole = whole.saturating_add(1);
    }
    let rest = vectors.get_mut(whole..).unwrap_or_default();
    if let Some(first) = rest.first_mut() {
        first.iov_len = first.iov_len.saturating_sub(bytes);
        first.iov_base = first.iov_base.cast::<u8>().wrapping_add(bytes).cast();
    }
    rest
}
