//! The memory file: guest memory, region after region, with holes where it is zero.

use crate::{
    Error,
    memory::{self, Memory},
};
use bivouac_protocol::monitor::PageRun;
use serde::{Deserialize, Serialize};
use std::{fs::File, os::unix::fs::FileExt, sync::Arc};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress,
    MmapRegion,
};

/// Memory is written and checked in pieces of this size, and named by them where it is damaged.
const PIECE: usize = 1 << 20;
const PAGE: usize = 4096;
static ZEROES: [u8; PAGE] = [0; PAGE];

/// What a memory file has to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLayout {
    pub mib: u32,
    /// CRC-32 of each MiB.
    checksums: Vec<u32>,
}

/// Writes all of guest memory to an empty file, and syncs it. The machine is paused.
pub fn write(memory: &Memory, mib: u32, file: &File) -> Result<MemoryLayout, Error> {
    let failed = Error::io::<std::io::Error>;
    if file.metadata().map_err(failed("look at the memory file"))?.len() != 0 {
        return Err(Error::Snapshot("the memory file is not empty".into()));
    }
    file.set_len(u64::from(mib) << 20).map_err(failed("size the memory file"))?;
    let mut checksums = Vec::with_capacity(mib as usize);
    let mut piece = vec![0; PIECE];
    let mut position = 0;
    for region in memory.iter() {
        let mut offset = 0;
        while offset < region.len() {
            read(region, offset, &mut piece)?;
            checksums.push(crc32fast::hash(&piece));
            write_pages(&piece, position, file).map_err(failed("write the memory file"))?;
            offset += PIECE as u64;
            position += PIECE as u64;
        }
    }
    file.sync_all().map_err(failed("sync the memory file"))?;
    Ok(MemoryLayout { mib, checksums })
}

/// Runs of pages that are not zero; the others stay holes.
fn write_pages(piece: &[u8], position: u64, file: &File) -> std::io::Result<()> {
    let mut run: Option<usize> = None;
    for (index, page) in piece.chunks(PAGE).enumerate() {
        let at = index * PAGE;
        match (page == ZEROES, run) {
            (false, None) => run = Some(at),
            (true, Some(start)) => {
                file.write_all_at(piece.get(start..at).unwrap_or_default(), position + start as u64)?;
                run = None;
            }
            _ => {}
        }
    }
    match run {
        Some(start) => file.write_all_at(piece.get(start..).unwrap_or_default(), position + start as u64),
        None => Ok(()),
    }
}

fn read(region: &GuestRegionMmap<()>, offset: u64, piece: &mut [u8]) -> Result<(), Error> {
    use vm_memory::Bytes;
    region
        .read_slice(piece, MemoryRegionAddress(offset))
        .map_err(|e| Error::Memory(format!("read at {offset:#x}: {e}")))
}

/// Where the pages of a memory file lie in guest memory, as ranges of guest addresses: two where the run crosses the device
/// gap. Empty for a run that is not wholly in the file.
pub fn guest_ranges(mib: u32, run: &PageRun) -> Vec<(u64, u64)> {
    let mut ranges = Vec::new();
    let (mut start, mut left) = (u64::from(run.first) * PAGE as u64, u64::from(run.count) * PAGE as u64);
    let mut position = 0;
    for (address, len) in memory::regions(mib) {
        if left > 0 && (position..position + len).contains(&start) {
            let here = left.min(position + len - start);
            ranges.push((address + (start - position), here));
            (start, left) = (start + here, left - here);
        }
        position += len;
    }
    if left == 0 { ranges } else { Vec::new() }
}

/// Has the kernel map pages at once, with copies of those that will be written. What cannot be is faulted in later.
pub fn populate(memory: &Memory, start: u64, bytes: u64, written: bool) {
    let Ok(len) = usize::try_from(bytes) else { return };
    let Ok(slice) = memory.get_slice(GuestAddress(start), len) else { return };
    let advice = if written { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    // SAFETY: the range is part of the mapping that is this guest's memory, and its content does not change by this.
    unsafe { libc::madvise(slice.ptr_guard_mut().as_ptr().cast(), len, advice) };
}

/// Has the kernel read each page by itself when it is touched.
pub fn read_singly(memory: &Memory) -> Result<(), Error> {
    for region in memory.iter() {
        let host =
            region.get_host_address(MemoryRegionAddress(0)).map_err(|e| Error::Memory(e.to_string()))?;
        let len = usize::try_from(region.len()).map_err(|_| Error::Memory("a region is too large".into()))?;
        // SAFETY: the range is this guest's memory, and only how it is read from its file changes.
        if unsafe { libc::madvise(host.cast(), len, libc::MADV_RANDOM) } < 0 {
            return Err(Error::Io { what: "advise on guest memory", why: std::io::Error::last_os_error() });
        }
    }
    Ok(())
}

/// Maps a memory file as a machine's own: what the guest changes is copied, and the file stays as it is.
pub fn map(layout: &MemoryLayout, file: File, verify: bool) -> Result<Memory, Error> {
    let refuse = |why: String| Error::Snapshot(why);
    if !(memory::MIN_MIB..=memory::MAX_MIB).contains(&layout.mib)
        || layout.checksums.len() != layout.mib as usize
    {
        return Err(refuse(format!("{} MiB with {} checksums", layout.mib, layout.checksums.len())));
    }
    let expected = u64::from(layout.mib) << 20;
    let found = file.metadata().map_err(Error::io("look at the memory file"))?.len();
    if found != expected {
        return Err(refuse(format!("the memory file has {found} bytes instead of {expected}")));
    }
    let file = Arc::new(file);
    let mut regions = Vec::new();
    let mut position = 0;
    for (start, len) in memory::regions(layout.mib) {
        let size = usize::try_from(len).map_err(|_| refuse(format!("{} MiB do not fit", layout.mib)))?;
        let offset = FileOffset::from_arc(Arc::clone(&file), position);
        let mapping = MmapRegion::build(
            Some(offset),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_NORESERVE,
        )
        .map_err(|e| Error::Memory(format!("map the memory file: {e}")))?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(start))
            .ok_or_else(|| refuse("a memory region ends beyond the address space".into()))?;
        regions.push(region);
        position += len;
    }
    if verify {
        check(layout, &file)?;
    }
    Memory::from_regions(regions).map_err(|e| Error::Memory(e.to_string()))
}

fn check(layout: &MemoryLayout, file: &File) -> Result<(), Error> {
    let mut piece = vec![0; PIECE];
    for (mib, checksum) in layout.checksums.iter().enumerate() {
        file.read_exact_at(&mut piece, (mib as u64) << 20).map_err(Error::io("read the memory file"))?;
        if crc32fast::hash(&piece) != *checksum {
            return Err(Error::Snapshot(format!(
                "the memory file is damaged: the checksum of MiB {mib} does not fit"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    const MIB: u32 = 64;

    fn file() -> File {
        tempfile::tempfile().unwrap()
    }

    fn saved() -> (File, MemoryLayout) {
        let memory = memory::allocate(MIB).unwrap();
        memory.write_slice(b"at the start", GuestAddress(0)).unwrap();
        memory.write_slice(b"near the end", GuestAddress((u64::from(MIB) << 20) - 12)).unwrap();
        let file = file();
        let layout = write(&memory, MIB, &file).unwrap();
        (file, layout)
    }

    #[test]
    fn memory_comes_back_and_the_file_never_changes() {
        let (file, layout) = saved();
        let clone = map(&layout, file.try_clone().unwrap(), true).unwrap();
        let mut found = [0; 12];
        clone.read_slice(&mut found, GuestAddress((u64::from(MIB) << 20) - 12)).unwrap();
        assert_eq!(&found, b"near the end");
        clone.write_slice(b"overwritten!", GuestAddress(0)).unwrap();
        let other = map(&layout, file, true).unwrap();
        other.read_slice(&mut found, GuestAddress(0)).unwrap();
        assert_eq!(&found, b"at the start");
    }

    #[test]
    fn zeroes_take_no_room_on_disk() {
        use std::os::unix::fs::MetadataExt;
        let (file, _) = saved();
        assert!(file.metadata().unwrap().blocks() * 512 <= 64 << 10);
    }

    #[test]
    fn a_changed_page_another_length_and_other_checksums_are_refused() {
        let (file, layout) = saved();
        file.write_all_at(&[1], 5 << 20).unwrap();
        let damaged = map(&layout, file.try_clone().unwrap(), true).unwrap_err().to_string();
        assert!(damaged.contains("MiB 5"), "{damaged}");
        file.set_len(u64::from(MIB) << 19).unwrap();
        let short = map(&layout, file.try_clone().unwrap(), false).unwrap_err().to_string();
        assert!(short.contains("instead of"), "{short}");
        let few = MemoryLayout { mib: MIB, checksums: vec![0] };
        assert!(map(&few, file, false).is_err());
    }

    #[test]
    fn pages_of_the_file_are_found_on_both_sides_of_the_device_gap() {
        let run = |first, count| PageRun { first, count, written: false };
        assert_eq!(guest_ranges(64, &run(2, 3)), [(0x2000, 0x3000)]);
        let last = (3 << 18) - 1;
        assert_eq!(guest_ranges(4096, &run(last, 2)), [(0xbfff_f000, 0x1000), (1 << 32, 0x1000)]);
        assert_eq!(guest_ranges(64, &run((64 << 8) - 1, 2)), []);
        assert_eq!(guest_ranges(64, &run(u32::MAX, u32::MAX)), []);
    }

    #[test]
    fn a_file_with_something_in_it_is_not_written_over() {
        let file = file();
        file.write_all_at(b"mine", 0).unwrap();
        assert!(write(&memory::allocate(MIB).unwrap(), MIB, &file).is_err());
    }
}
