//! The lab's kernel: Debian's own for clouds, with kvm_amd, vhost-vsock, tap, nftables and XFS as modules.
//!
//! It is unpacked into the cache and never installed. Kernel and modules are decompressed here, once, rather than by
//! an emulated processor at each start.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow};

use crate::cache::Cache;
use crate::progress::Step;
use crate::{deb, host};

/// Pulls in the newest of its line; virtiofs is built in, which spares the initramfs most modules.
const PACKAGE: &str = "linux-image-6.12-cloud-amd64";
/// Raised when the steps below change.
const RECIPE: &str = "1";

#[derive(Debug)]
pub struct Parts {
    /// Uncompressed kernel (ELF), started by its PVH entry.
    pub kernel: PathBuf,
    /// Folder of the modules, as modprobe expects it.
    pub modules: PathBuf,
}

pub fn get(cache: &Cache) -> Result<Parts> {
    let suffix = format!("-{RECIPE}");
    // The version of the empty package is that of the kernel it stands for.
    let version = deb::version(cache, PACKAGE, "lab", &suffix)?;
    let dir = cache.folder(&format!("lab/{version}{suffix}"), |dir| unpack(cache, dir))?;
    Ok(Parts { kernel: dir.join("vmlinux"), modules: dir.join("modules") })
}

fn unpack(cache: &Cache, out: &Path) -> Result<()> {
    host::need(cache, host::LAB)?;
    let package = deb::stands_for(PACKAGE)?;
    let step = Step::begin(cache, "lab: unpack Debian's kernel")?;
    let work = out.join("work");
    fs::create_dir(&work)?;
    let files = deb::unpack(&step, &package, &work)?;

    let release = only_entry(&files.join("lib/modules"))?;
    let packed = fs::read(files.join("boot").join(format!("vmlinuz-{release}")))?;
    let payload = work.join("payload.zst");
    fs::write(&payload, payload_of(&packed)?)?;
    step.run(Command::new("zstd").args(["-q", "-d"]).arg(&payload).arg("-o").arg(out.join("vmlinux")))?;

    let modules = files.join("lib/modules").join(&release);
    step.run(
        Command::new("find").arg(&modules).args(["-name", "*.ko.xz", "-exec", "xz", "-d", "-T0", "{}", "+"]),
    )?;
    step.run(Command::new("depmod").arg("-b").arg(&files).arg(&release))?;
    fs::rename(&modules, out.join("modules"))?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
}

fn only_entry(dir: &Path) -> Result<String> {
    let entry = fs::read_dir(dir)?.next().ok_or_else(|| anyhow!("{} is empty", dir.display()))??;
    Ok(entry.file_name().to_string_lossy().into_owned())
}

/// The compressed kernel inside a bzImage (Linux x86 boot protocol 2.08: `setup_sects` at 0x1f1, `payload_offset` at
/// 0x248, `payload_length` at 0x24c), without the four bytes of size that follow the compressed stream.
fn payload_of(image: &[u8]) -> Result<&[u8]> {
    let field = |at: usize| -> Option<usize> {
        let bytes = image.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    let payload = || -> Option<&[u8]> {
        let setup_sectors = usize::from(*image.get(0x1f1)?);
        let from = (setup_sectors + 1) * 512 + field(0x248)?;
        image.get(from..from.checked_add(field(0x24c)?)?.checked_sub(4)?)
    };
    payload().filter(|payload| payload.starts_with(&[0x28, 0xb5, 0x2f, 0xfd])).ok_or_else(|| {
        anyhow!("Debian's kernel is not packed with zstd any more: xtask/src/lab/parts.rs must learn how")
    })
}
