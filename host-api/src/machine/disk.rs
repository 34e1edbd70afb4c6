//! A sandbox's own disk: a clone of an empty file system, sharing its blocks where the host's file system can.

use super::MachineError;
use rustix::fs::{SeekFrom, copy_file_range, ftruncate, ioctl_ficlone, seek};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// `<prefix>/scratch/ext4-<mib>.img`.
#[derive(Debug, Clone)]
pub struct EmptyDisks {
    folder: PathBuf,
}

impl EmptyDisks {
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    fn path(&self, mib: u32) -> PathBuf {
        self.folder.join(format!("ext4-{mib}.img"))
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
        let source = File::open(&path).map_err(MachineError::io(format!("opening {}", path.display())))?;
        clone(&source, target, &path)
    }
}

fn clone(source: &File, target: &File, path: &Path) -> Result<(), MachineError> {
    if ioctl_ficlone(target, source).is_ok() {
        return Ok(());
    }
    copy_sparse(source, target).map_err(MachineError::os(format!("copying {}", path.display())))
}

/// Copies what is data and leaves what is hole.
fn copy_sparse(source: &File, target: &File) -> rustix::io::Result<()> {
    let size = seek(source, SeekFrom::End(0))?;
    ftruncate(target, size)?;
    let mut at = 0;
    while at < size {
        let start = match seek(source, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data from here to the end.
            Err(rustix::io::Errno::NXIO) => break,
            Err(e) => return Err(e),
        };
        let end = seek(source, SeekFrom::Hole(start))?;
        let (mut from, mut to) = (start, start);
        while from < end {
            let want = usize::try_from(end.saturating_sub(from)).unwrap_or(usize::MAX);
            if copy_file_range(source, Some(&mut from), target, Some(&mut to), want)? == 0 {
                return Err(rustix::io::Errno::IO);
            }
        }
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_copied_disk_has_the_same_bytes_and_the_same_holes() {
        let dir = tempfile::tempdir().unwrap();
        let disks = EmptyDisks::new(dir.path().to_owned());
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
}
