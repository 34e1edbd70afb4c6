//! Room on the disk of the data directory that is kept for deletes.
//!
//! A delete frees room, and takes a little to be recorded first: on a disk that is full, it could not be. So a file of
//! nothing is kept, given up when an end cannot be recorded, and made again once something has been released.

use rustix::fs::FallocateFlags;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Enough to record some hundred ends, each of which frees more than it takes.
const BYTES: u64 = 4 << 20;

#[derive(Debug, Clone)]
pub struct Reserve {
    path: PathBuf,
}

impl Reserve {
    pub fn new(data_dir: &Path) -> Self {
        Self { path: data_dir.join("reserve") }
    }

    /// Makes the reserve, if it is not there. Where there is no room for it there is none for anything else either, and
    /// whoever needs it is told.
    pub fn keep(&self) {
        if let Err(cause) = self.make() {
            tracing::debug!(%cause, file = %self.path.display(), "no room is kept for deletes");
            // Half of it would only be in the way.
            self.give_up();
        }
    }

    fn make(&self) -> io::Result<()> {
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.path)?;
        if file.metadata()?.len() < BYTES {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, BYTES)?;
        }
        Ok(())
    }

    /// Makes room; true if there was a reserve.
    pub fn give_up(&self) -> bool {
        std::fs::remove_file(&self.path).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_reserve_takes_its_room_and_gives_it_up_once() {
        let dir = tempfile::tempdir().unwrap();
        let reserve = Reserve::new(dir.path());
        assert!(!reserve.give_up());
        reserve.keep();
        reserve.keep();
        let found = std::fs::metadata(dir.path().join("reserve")).unwrap();
        assert!(found.blocks() * 512 >= BYTES, "the room is taken, not only named");
        assert_eq!(found.mode() & 0o077, 0);
        assert!(reserve.give_up());
        assert!(!reserve.give_up());
    }
}
