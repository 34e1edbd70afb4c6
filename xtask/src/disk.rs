//! Empty disks: a sandbox's own begins as a clone of one.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::Cache;
use crate::host;
use crate::progress::Step;

/// Fixed, so that the same size gives the same bytes. Nothing finds a disk by its UUID.
const UUID: &str = "b1b0ac00-0000-4000-8000-000000000002";

/// Raised when the steps below change.
const RECIPE: &str = "2";

/// A sparse file of `mib` MiB with an empty ext4 that mounts without a recovery, a check, or a thread that still writes
/// its tables; its size on disk is what a sparse copy of it costs.
///
/// Without a journal: a disk outlives its machine only where that was shut down in order, and one whose machine died is
/// thrown away with it. Every write would otherwise be made twice, and every mount would begin with the journal.
pub fn empty(cache: &Cache, mib: u32) -> Result<PathBuf> {
    cache.file(&format!("scratch/{RECIPE}/ext4-{mib}.img"), |path| {
        host::need(cache, host::ROOTFS)?;
        let step = Step::begin(cache, &format!("empty disk of {mib} MiB"))?;
        make(&step, path, mib)
    })
}

fn make(step: &Step, path: &Path, mib: u32) -> Result<()> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    file.set_len(u64::from(mib) << 20)?;
    let extended = [
        // The file is new and sparse: what was never written reads as zeros.
        "assume_storage_prezeroed=1",
        "lazy_itable_init=1",
        "packed_meta_blocks=1",
        "nodiscard",
        "root_owner=0:0",
        &format!("hash_seed={UUID}"),
    ];
    step.run(
        Command::new("mkfs.ext4")
            .env("E2FSPROGS_FAKE_TIME", "1767225600")
            // One file per 8 KiB, since trees of small files are what gets unpacked here; no blocks kept for root.
            .args(["-q", "-F", "-b", "4096", "-i", "8192", "-m", "0", "-O", "^resize_inode,^has_journal"])
            .args(["-U", UUID, "-E", &extended.join(",")])
            .arg(path),
    )
}
