//! The sandbox's disk, as a file of the host's.

use crate::world::{SMALL, World};
use rustix::fs::{SeekFrom, seek};
use std::{fs::File, os::unix::fs::FileExt, path::Path};

/// Whether the file holds these bytes somewhere.
pub fn holds(path: &Path, wanted: &[u8]) -> bool {
    let file = File::open(path).unwrap();
    let mut at = 0;
    // Holes are zeroes, and passed over.
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(start)).unwrap();
        let mut bytes = vec![0; usize::try_from(at - start).unwrap()];
        file.read_exact_at(&mut bytes, start).unwrap();
        if bytes.windows(wanted.len()).any(|window| window == wanted) {
            return true;
        }
    }
    false
}

#[test]
fn what_was_synced_in_the_guest_is_in_the_disk_file() {
    let world = World::new();
    let guest = world.boot(SMALL);
    let disk = guest.folder().join("scratch.img");
    // Put together in the guest, so that no command line on the disk can be mistaken for it.
    guest.shell("a=first-half; echo ${a}-of-a-synced-line > /root/synced; sync");
    assert!(holds(&disk, b"first-half-of-a-synced-line"));
    guest.shell("a=other-half; echo ${a}-of-an-fsynced-line | dd of=/root/fsynced conv=fsync 2>&1");
    assert!(holds(&disk, b"other-half-of-an-fsynced-line"));
}
