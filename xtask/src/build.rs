//! The programs, and the folder from which they are run: `target/bivouac`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::cache::Cache;
use crate::progress::Step;
use crate::{cache, disk, host, kernel, repository, rootfs};

/// What makes a program a kernel: linked to an address, with nothing that a system would bring along.
const KERNEL_FLAGS: &[&str] = &[
    "-Crelocation-model=static",
    "-Clink-arg=-nostartfiles",
    "-Clink-arg=-Wl,--build-id=none",
    "-Clink-arg=-Wl,-T,link.ld",
];

/// The only target there is; `.cargo/config.toml` names it too, so it is part of every artifact's path.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds everything; returns the folder that holds it: `bin/`, `kernel/vmlinux`, `templates/`, `scratch/`.
pub fn all(cache: &Cache) -> Result<PathBuf> {
    let vmlinux = kernel::vmlinux(cache)?;
    let monitor = monitor(cache)?;
    let (daemon, command_line) =
        (release(cache, "bivouacd", "bivouacd")?, release(cache, "bivouac", "bivouac")?);

    let prefix = target_dir()?.join("bivouac");
    let bin = prefix.join("bin");
    for folder in ["bin", "kernel", "scratch", "templates"] {
        fs::create_dir_all(prefix.join(folder))?;
    }
    place(&monitor, &bin.join("bivouac-vmm"))?;
    place(&daemon, &bin.join("bivouacd"))?;
    place(&command_line, &bin.join("bivouac"))?;
    place(&vmlinux, &prefix.join("kernel/vmlinux"))?;
    for template in rootfs::templates(None)? {
        let image = template.image(cache)?;
        let folder = prefix.join("templates").join(&template.name);
        fs::create_dir_all(&folder)?;
        // The image first: the daemon takes the manifest's word for its digest.
        for file in ["rootfs.erofs", "template.toml", "packages.txt"] {
            place(&image.join(file), &folder.join(file))?;
        }
        let disk = disk::empty(cache, template.disk_mib()?)?;
        let name = disk.file_name().ok_or_else(|| anyhow!("{} has no name", disk.display()))?;
        place(&disk, &prefix.join("scratch").join(name))?;
    }
    Ok(prefix)
}

/// The guest agent, which goes into every image.
pub fn agent(cache: &Cache) -> Result<PathBuf> {
    // Linked to run where it is loaded: nothing inside is protected by where the agent's code lies, and relocating it would
    // touch half its pages before its first instruction.
    let path = cargo(cache, "bivouac-agent", "small", "bivouac-agent", &["-C", "relocation-model=static"])?;
    must_be_static(&path)?;
    Ok(path)
}

fn monitor(cache: &Cache) -> Result<PathBuf> {
    let path = cargo(cache, "bivouac-vmm", "monitor", "bivouac-vmm", &[])?;
    must_be_static(&path)?;
    Ok(path)
}

/// A program in the profile of those that need neither be small nor start in no time.
pub fn release(cache: &Cache, package: &str, binary: &str) -> Result<PathBuf> {
    cargo(cache, package, "release", binary, &[])
}

/// The guest that attacks its monitor. Not in the folder of what is shipped: only tests boot it.
pub fn hostile_guest(cache: &Cache) -> Result<PathBuf> {
    host::need(cache, host::BUILD)?;
    let _step = Step::begin(cache, "compile the hostile guest")?;
    let folder = repository().join("hostile-guest");
    let target = target_dir()?.join("hostile-guest");
    let status = Command::new(cargo_program())
        .args(["rustc", "--quiet", "--release", "--target", TARGET, "--target-dir"])
        .arg(&target)
        .arg("--")
        .args(KERNEL_FLAGS)
        .arg(format!("-Clink-arg=-Wl,-L,{}", folder.display()))
        .current_dir(&folder)
        .stdout(std::io::stderr())
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("hostile-guest does not build");
    }
    Ok(target.join(TARGET).join("release/hostile-guest"))
}

fn cargo(cache: &Cache, package: &str, profile: &str, binary: &str, flags: &[&str]) -> Result<PathBuf> {
    host::need(cache, host::BUILD)?;
    // Cargo's own words, warnings and errors, are for the reader; its progress is the step's.
    let _step = Step::begin(cache, &format!("compile {binary}"))?;
    let status = Command::new(cargo_program())
        .args(["rustc", "--quiet", "--profile", profile, "--package", package, "--bin", binary, "--"])
        .args(flags)
        .current_dir(repository())
        .stdout(std::io::stderr())
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("{package} does not build");
    }
    Ok(target_dir()?.join(TARGET).join(profile).join(binary))
}

/// The cargo that runs this program.
pub fn cargo_program() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Where cargo puts what it builds, by every way of telling it.
pub fn target_dir() -> Result<PathBuf> {
    let output = Command::new(cargo_program())
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(repository())
        .output()
        .context("cannot start cargo")?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).with_context(|| {
        format!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim())
    })?;
    let path = metadata.get("target_directory").and_then(serde_json::Value::as_str);
    path.map(PathBuf::from).ok_or_else(|| anyhow!("cargo metadata names no target directory"))
}

/// Puts a file into place as another name of the same file, or as a copy (a clone where there are any) on another
/// filesystem. In one step, so that whoever runs or reads the old one goes on doing so.
fn place(from: &Path, to: &Path) -> Result<()> {
    let context = || format!("cannot place {} at {}", from.display(), to.display());
    let beside = to.with_extension("new");
    cache::remove(&beside)?;
    if fs::hard_link(from, &beside).is_err() {
        let copied = Command::new("cp")
            .args(["--reflink=auto", "--sparse=always", "--"])
            .arg(from)
            .arg(&beside)
            .status();
        if !copied.with_context(context)?.success() {
            bail!(context());
        }
    }
    // Of two names of one file, rename leaves both.
    fs::rename(&beside, to).with_context(context)?;
    cache::remove(&beside)
}

fn must_be_static(path: &Path) -> Result<()> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if interpreter(&bytes).ok_or_else(|| anyhow!("{} is not a 64-bit ELF program", path.display()))? {
        bail!(
            "{} is not static: RUSTFLAGS in the environment overrides the flags in .cargo/config.toml; \
             unset it, or add `-C target-feature=+crt-static` to it",
            path.display()
        );
    }
    Ok(())
}

/// Whether a 64-bit little-endian ELF asks for a dynamic loader (a program header of type `PT_INTERP`, 3). Offsets are
/// those of `Elf64_Ehdr` in elf(5).
fn interpreter(elf: &[u8]) -> Option<bool> {
    let short =
        |at: usize| Some(usize::from(u16::from_le_bytes(elf.get(at..at.checked_add(2)?)?.try_into().ok()?)));
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(elf.get(32..40)?.try_into().ok()?)).ok()?;
    let (size, count) = (short(54)?, short(56)?);
    for index in 0..count {
        let at = index.checked_mul(size)?.checked_add(table)?;
        if elf.get(at..at.checked_add(4)?)? == [3, 0, 0, 0] {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(kinds: &[u8]) -> Vec<u8> {
        let mut elf = vec![0; 64];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[32] = 64;
        elf[54] = 56;
        elf[56] = kinds.len() as u8;
        for kind in kinds {
            elf.push(*kind);
            elf.resize(elf.len() + 55, 0);
        }
        elf
    }

    #[test]
    fn a_program_with_an_interpreter_is_not_static() {
        assert_eq!(interpreter(&elf(&[1, 1, 2])), Some(false));
        assert_eq!(interpreter(&elf(&[1, 3, 2])), Some(true));
        assert_eq!(interpreter(b"#!/bin/sh\n"), None);
        assert_eq!(interpreter(&elf(&[1, 1])[..100]), None);
    }
}
