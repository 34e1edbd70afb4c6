//! Debian packages that are unpacked into the cache and never installed: kernel sources, and the lab's kernel.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::cache::Cache;
use crate::host::{apt_get, is_root};
use crate::progress::Step;

/// The version that apt would download now. Refreshes apt's lists if they do not know the package.
pub fn candidate(cache: &Cache, package: &str) -> Result<String> {
    if let Some(version) = policy(package)? {
        return Ok(version);
    }
    if !is_root() {
        bail!("apt knows no package {package}: let root run `apt-get update`, then try again");
    }
    Step::begin(cache, "refresh the package lists")?.run(apt_get().arg("update"))?;
    policy(package)?.ok_or_else(|| {
        anyhow!(
            "apt knows no package {package}: Debian 12's security archive (suite bookworm-security, component \
             main) must be among its sources"
        )
    })
}

/// The version to use: what apt would download, or, where apt knows none (its lists can be gone), what the cache
/// already has under `folder` as `<version><suffix>`.
pub fn version(cache: &Cache, package: &str, folder: &str, suffix: &str) -> Result<String> {
    if let Some(version) = policy(package)? {
        return Ok(version);
    }
    let cached = std::fs::read_dir(cache.root().join(folder)).into_iter().flatten().filter_map(|entry| {
        let entry = entry.ok()?;
        let version = entry.file_name().to_str()?.strip_suffix(suffix)?.to_owned();
        Some((entry.metadata().ok()?.modified().ok()?, version))
    });
    match cached.max() {
        Some((_, version)) => Ok(version),
        None => candidate(cache, package),
    }
}

/// The one package that the empty package `meta` stands for.
pub fn stands_for(meta: &str) -> Result<String> {
    let output =
        Command::new("apt-cache").args(["depends", meta]).output().context("cannot start apt-cache")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .find_map(|line| line.trim().strip_prefix("Depends: "))
        .map(str::to_owned)
        .ok_or_else(|| anyhow!("apt does not say what {meta} depends on"))
}

/// Downloads `package` into `dir` and unpacks it there; returns the folder that its files are in.
pub fn unpack(step: &Step, package: &str, dir: &Path) -> Result<PathBuf> {
    let download = || step.run(apt_get().args(["download", package]).current_dir(dir));
    if let Err(why) = download() {
        // The lists may name a version that the mirror has since replaced.
        if !is_root() {
            return Err(why);
        }
        step.run(apt_get().arg("update"))?;
        download()?;
    }
    let found = std::fs::read_dir(dir)?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ext| ext == "deb"))
        .ok_or_else(|| anyhow!("apt-get downloaded no package into {}", dir.display()))?;
    let files = dir.join("files");
    step.run(Command::new("dpkg-deb").arg("-x").arg(&found).arg(&files))?;
    std::fs::remove_file(&found)?;
    Ok(files)
}

fn policy(package: &str) -> Result<Option<String>> {
    let output =
        Command::new("apt-cache").args(["policy", package]).env("LC_ALL", "C").output().context(
            "cannot start apt-cache: bivouac is built on Debian 12 (or a system with its packages)",
        )?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
    Ok(version.filter(|version| *version != "(none)").map(str::to_owned))
}
