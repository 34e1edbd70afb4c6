//! Which pages of a memory file a clone touches between being taken up and the end of its first command.
//!
//! One clone is watched, once: the host forgets what it holds of the file, the clone reads page by page, and what the host
//! holds afterwards is what was touched. Of those, the ones that the clone has copies of are the ones that it wrote.

use bivouac_protocol::monitor::{MAX_MESSAGE, PageRun};
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

const PAGE: u64 = 4096;
/// Runs that fit a message to the monitor with room to spare: at most 11 bytes each.
const RUNS_MAX: usize = MAX_MESSAGE / 16;
/// `/proc/PID/pagemap`: present; of a file or shared (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;

/// Drops the file's pages from the page cache. It has been synced, and nobody has it mapped.
pub fn forget(file: &File) -> io::Result<()> {
    Ok(fadvise(file, 0, None, Advice::DontNeed)?)
}

pub fn of(monitor: i32, memory: &Path) -> io::Result<Vec<PageRun>> {
    let touched = resident(&File::open(memory)?)?;
    let written = copied(monitor, memory, touched.len())?;
    let pages = touched.into_iter().zip(written).map(|(touched, written)| match (touched, written) {
        (_, true) => Some(true),
        (true, false) => Some(false),
        (false, false) => None,
    });
    Ok(runs(pages))
}

/// For each page of the file, whether the host holds it.
fn resident(file: &File) -> io::Result<Vec<bool>> {
    let bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
    let mut flags = vec![0_u8; bytes.div_ceil(4096)];
    // SAFETY: a new mapping, read by nobody; `flags` has a byte for each of its pages; unmapped before it is forgotten.
    unsafe {
        let map =
            libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let told = libc::mincore(map, bytes, flags.as_mut_ptr());
        let failed = (told < 0).then(io::Error::last_os_error);
        libc::munmap(map, bytes);
        failed.map_or(Ok(()), Err)?;
    }
    Ok(flags.into_iter().map(|flag| flag & 1 != 0).collect())
}

/// For each page of the file, whether the process has a copy of its own in the place of it.
fn copied(process: i32, file: &Path, pages: usize) -> io::Result<Vec<bool>> {
    let maps = fs::read_to_string(format!("/proc/{process}/maps"))?;
    let pagemap = File::open(format!("/proc/{process}/pagemap"))?;
    let mut written = vec![false; pages];
    let name = fs::canonicalize(file)?;
    for mapping in maps.lines().filter_map(|line| mapping_of(line, &name)) {
        let (start, end, offset) = mapping;
        let count = usize::try_from((end - start) / PAGE).map_err(io::Error::other)?;
        let mut entries = vec![0; count * 8];
        pagemap.read_exact_at(&mut entries, start / PAGE * 8)?;
        let first = usize::try_from(offset / PAGE).map_err(io::Error::other)?;
        let entries = entries.as_chunks::<8>().0.iter().map(|entry| u64::from_le_bytes(*entry));
        for (slot, entry) in written.iter_mut().skip(first).zip(entries) {
            *slot |= entry & PRESENT != 0 && entry & OF_FILE == 0;
        }
    }
    Ok(written)
}

/// Start, end and file offset, if a line of `/proc/PID/maps` is about the file.
fn mapping_of(line: &str, file: &Path) -> Option<(u64, u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let offset = fields.nth(1)?;
    (Path::new(fields.nth(2)?) == file).then_some(())?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some((number(start)?, number(end)?, number(offset)?))
}

/// Neighbours of one kind as runs. `None`: not touched.
fn runs(pages: impl Iterator<Item = Option<bool>>) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    for (page, kind) in (0_u32..).zip(pages) {
        let Some(written) = kind else { continue };
        let follows =
            |run: &&mut PageRun| run.written == written && run.first.checked_add(run.count) == Some(page);
        if let Some(run) = runs.last_mut().filter(follows) {
            run.count += 1;
            continue;
        }
        if runs.len() >= RUNS_MAX {
            break;
        }
        runs.push(PageRun { first: page, count: 1, written });
    }
    runs
}

/// One line for each run: first page, count, `w` or `r`.
pub fn write(path: &Path, runs: &[PageRun]) -> io::Result<()> {
    let text: String = runs
        .iter()
        .map(|run| format!("{} {} {}\n", run.first, run.count, if run.written { 'w' } else { 'r' }))
        .collect();
    let beside = path.with_extension("partial");
    fs::write(&beside, text)?;
    fs::rename(&beside, path)
}

pub fn read(path: &Path) -> Option<Vec<PageRun>> {
    let text = fs::read_to_string(path).ok()?;
    let run = |line: &str| {
        let mut fields = line.split(' ');
        let (first, count) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let written = match fields.next()? {
            "w" => true,
            "r" => false,
            _ => return None,
        };
        Some(PageRun { first, count, written })
    };
    text.lines().take(RUNS_MAX).map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_kind_are_one_run() {
        let pages = [None, Some(false), Some(false), Some(true), None, Some(true)];
        let run = |first, count, written| PageRun { first, count, written };
        assert_eq!(runs(pages.into_iter()), [run(1, 2, false), run(3, 1, true), run(5, 1, true)]);
    }

    #[test]
    fn what_is_written_down_is_read_back_and_nonsense_is_no_working_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("working-set");
        assert_eq!(read(&path), None);
        let runs =
            [PageRun { first: 7, count: 2, written: true }, PageRun { first: 90, count: 1, written: false }];
        write(&path, &runs).unwrap();
        assert_eq!(read(&path).unwrap(), runs);
        fs::write(&path, "7 2 x\n").unwrap();
        assert_eq!(read(&path), None);
    }

    #[test]
    fn a_line_about_the_file_is_understood_and_others_are_not() {
        let line = "7f00-9f00 rw-p 00002000 08:01 1234                       /data/memory";
        assert_eq!(mapping_of(line, Path::new("/data/memory")), Some((0x7f00, 0x9f00, 0x2000)));
        assert_eq!(mapping_of(line, Path::new("/data/other")), None);
        assert_eq!(mapping_of("7f00-9f00 rw-p 0 00:00 0", Path::new("/data/memory")), None);
    }
}
