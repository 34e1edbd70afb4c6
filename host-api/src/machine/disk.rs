//! A sandbox's own disk: a clone of an empty file system, sharing its blocks where the host's file system can.

use super::MachineError;
use rustix::fs::{SeekFrom, copy_file_range, ftruncate, ioctl_ficlone, seek};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

/// Bytes copied at a time where the kernel cannot copy by itself.
const PIECE: usize = 1 << 20;

/// `<prefix>/scratch/ext4-<mib>.img`, and copies of them on the file system where sandboxes' disks are.
#[derive(Debug, Clone)]
pub struct EmptyDisks {
    folder: PathBuf,
    /// A clone never crosses file systems: where the originals are elsewhere, a copy of each is kept here.
    near: PathBuf,
}

impl EmptyDisks {
    pub fn new(folder: PathBuf, near: PathBuf) -> Self {
        Self { folder, near }
    }

    fn path(&self, mib: u32) -> PathBuf {
        self.folder.join(name(mib))
    }

    /// The sizes there are, in MiB, smallest first.
    pub fn sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = fs::read_dir(&self.folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                entry.file_name().to_str()?.strip_prefix("ext4-")?.strip_suffix(".img")?.parse().ok()
            })
            .collect();
        sizes.sort_unstable();
        sizes
    }

    pub fn clone_into(&self, mib: u32, target: &File) -> Result<(), MachineError> {
        let path = self.path(mib);
        let failed = || MachineError::io(format!("copying {}", path.display()));
        let original = File::open(&path).map_err(MachineError::io(format!("opening {}", path.display())))?;
        if ioctl_ficlone(target, &original).is_ok() {
            return Ok(());
        }
        let far = original.metadata().map_err(failed())?.dev() != target.metadata().map_err(failed())?.dev();
        let source = if far { self.near(mib, &original).map_err(failed())? } else { original };
        clone_file(&source, target).map_err(failed())
    }

    /// The copy on this file system, made anew when the original has changed.
    fn near(&self, mib: u32, original: &File) -> io::Result<File> {
        let told = original.metadata()?;
        let path = self.near.join(name(mib));
        if let Ok(copy) = File::open(&path) {
            let meta = copy.metadata()?;
            if meta.len() == told.len() && meta.mtime() == told.mtime() {
                return Ok(copy);
            }
        }
        fs::create_dir_all(&self.near)?;
        // Written beside and renamed, by a name of its own: two sandboxes may find it missing at once.
        let beside = self.near.join(format!("{}.{}", name(mib), ulid::Ulid::generate()));
        let copied = File::options().read(true).write(true).create_new(true).open(&beside).and_then(|copy| {
            copy_sparse(original, &copy)?;
            copy.set_modified(told.modified()?)?;
            fs::rename(&beside, &path)?;
            Ok(copy)
        });
        if copied.is_err() {
            let _ = fs::remove_file(&beside);
        }
        copied
    }
}

/// Makes an empty file the same as another: sharing its blocks where the file system can, with its holes elsewhere.
pub fn clone_file(source: &File, target: &File) -> io::Result<()> {
    if ioctl_ficlone(target, source).is_ok() { Ok(()) } else { copy_sparse(source, target) }
}

fn name(mib: u32) -> String {
    format!("ext4-{mib}.img")
}

/// Copies what is data and leaves what is hole.
fn copy_sparse(source: &File, target: &File) -> io::Result<()> {
    let size = seek(source, SeekFrom::End(0))?;
    ftruncate(target, size)?;
    let mut at = 0;
    while at < size {
        let start = match seek(source, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data from here to the end.
            Err(Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let end = seek(source, SeekFrom::Hole(start))?;
        copy_extent(source, target, start, end)?;
        at = end;
    }
    Ok(())
}

fn copy_extent(source: &File, target: &File, start: u64, end: u64) -> io::Result<()> {
    let (mut from, mut to) = (start, start);
    while from < end {
        let want = usize::try_from(end.saturating_sub(from)).unwrap_or(usize::MAX);
        match copy_file_range(source, Some(&mut from), target, Some(&mut to), want) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                return copy_by_hand(source, target, from, end);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// For file systems that the kernel does not copy between; they may not know their holes either, so zeroes are one.
fn copy_by_hand(source: &File, target: &File, mut at: u64, end: u64) -> io::Result<()> {
    let mut piece = vec![0_u8; PIECE];
    while at < end {
        let want = usize::try_from(end.saturating_sub(at)).unwrap_or(PIECE).min(PIECE);
        let data = piece.get_mut(..want).unwrap_or_default();
        source.read_exact_at(data, at)?;
        if data.iter().any(|byte| *byte != 0) {
            target.write_all_at(data, at)?;
        }
        at = at.saturating_add(u64::try_from(want).unwrap_or(u64::MAX));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copied_disk_has_the_same_bytes_and_the_same_holes() {
        let dir = tempfile::tempdir().unwrap();
        let disks = EmptyDisks::new(dir.path().to_owned(), dir.path().join("near"));
        let path = disks.path(64);
        let source = File::create(&path).unwrap();
        source.set_len(64 << 20).unwrap();
        source.write_all_at(b"super block", 1024).unwrap();
        source.write_all_at(b"far away", 40 << 20).unwrap();
        assert_eq!(disks.sizes(), [64]);

        let target =
            File::options().read(true).write(true).create_new(true).open(dir.path().join("t")).unwrap();
        disks.clone_into(64, &target).unwrap();

        assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(dir.path().join("t")).unwrap());
        assert!(target.metadata().unwrap().blocks() * 512 < 1 << 20);
    }

    #[test]
    fn a_disk_from_another_file_system_is_copied_there_once_and_again_when_it_changed() {
        let (dir, far) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        let disks = EmptyDisks::new(far.path().to_owned(), dir.path().join("near"));
        fs::write(disks.path(1), b"one").unwrap();
        let clone = |name: &str| {
            let target =
                File::options().read(true).write(true).create_new(true).open(dir.path().join(name)).unwrap();
            disks.clone_into(1, &target).unwrap();
            fs::read(dir.path().join(name)).unwrap()
        };
        assert_eq!(clone("a"), b"one");
        let inode = |path: PathBuf| fs::metadata(path).unwrap().ino();
        let first = inode(dir.path().join("near/ext4-1.img"));
        assert_eq!(clone("b"), b"one");
        assert_eq!(inode(dir.path().join("near/ext4-1.img")), first);
        fs::write(disks.path(1), b"three").unwrap();
        assert_eq!(clone("c"), b"three");
    }

    #[test]
    fn zeroes_copied_by_hand_become_holes() {
        let dir = tempfile::tempdir().unwrap();
        let open = |name: &str| {
            File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(dir.path().join(name))
                .unwrap()
        };
        let (source, target) = (open("s"), open("t"));
        source.write_all_at(&vec![0; 8 << 20], 0).unwrap();
        source.write_all_at(b"data", 5 << 20).unwrap();
        target.set_len(8 << 20).unwrap();
        copy_by_hand(&source, &target, 0, 8 << 20).unwrap();
        assert_eq!(fs::read(dir.path().join("s")).unwrap(), fs::read(dir.path().join("t")).unwrap());
        assert!(target.metadata().unwrap().blocks() * 512 <= 1 << 20);
    }
}
