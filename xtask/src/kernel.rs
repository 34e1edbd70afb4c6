//! The guest kernel: Debian's source, our configuration, built once for each pair of the two.
//!
//! `kernel-config/*.config` over `allnoconfig`; what no fragment names is off. The same source and fragments give the
//! same bytes, so the cached file is known by their hash and vouched for by its checksum.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::digest;
use crate::progress::Step;
use crate::{deb, host, repository};

const SOURCE: &str = "linux-source-6.12";
/// Raised when the steps below change what comes out of the same source and fragments.
const RECIPE: &str = "1";
/// What a kernel would otherwise record of the machine and moment it was built on.
const FIXED: &[(&str, &str)] = &[
    ("KBUILD_BUILD_TIMESTAMP", "Thu Jan  1 00:00:00 UTC 2026"),
    ("KBUILD_BUILD_USER", "bivouac"),
    ("KBUILD_BUILD_HOST", "bivouac"),
    ("KBUILD_BUILD_VERSION", "1"),
];

/// Path of the uncompressed kernel, which is built first if need be.
pub fn vmlinux(cache: &Cache) -> Result<PathBuf> {
    let fragments = fragments(&repository().join("kernel-config"))?;
    let hash = digest::of_parts([RECIPE, &format!("{FIXED:?}"), &fragments]);
    let suffix = format!("-{}", digest::short(&hash));
    let version = deb::version(cache, SOURCE, "kernel", &suffix)?;
    let name = format!("kernel/{version}{suffix}");
    let dir = cache.folder(&name, |dir| build(cache, &version, &fragments, dir))?;
    let vmlinux = dir.join("vmlinux");
    let expected = fs::read_to_string(dir.join("vmlinux.sha256"))?;
    if digest::of_file(&vmlinux)? != expected.trim() {
        bail!(
            "{} is not what was built: its checksum differs. Remove {} and try again",
            vmlinux.display(),
            dir.display()
        );
    }
    Ok(vmlinux)
}

/// All fragments as one text, in order of their names.
fn fragments(dir: &Path) -> Result<String> {
    let mut paths: Vec<PathBuf> = fs::read_dir(dir)
        .with_context(|| format!("cannot list {}", dir.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|ext| ext == "config"));
    paths.sort();
    let texts: Vec<String> = paths
        .iter()
        .map(|path| fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display())))
        .collect::<Result<_>>()?;
    Ok(texts.concat())
}

fn build(cache: &Cache, version: &str, fragments: &str, out: &Path) -> Result<()> {
    host::need(cache, host::KERNEL)?;
    let work = out.join("work");
    fs::create_dir(&work)?;

    let step = Step::begin(cache, "guest kernel: unpack the source")?;
    let files = deb::unpack(&step, &format!("{SOURCE}={version}"), &work)?;
    let tree = work.join("linux");
    fs::create_dir(&tree)?;
    let archive = files.join(format!("usr/src/{SOURCE}.tar.xz"));
    step.run(
        Command::new("tar")
            .args(["--strip-components=1", "--exclude=Documentation/*/*", "-xJf"])
            .arg(&archive)
            .arg("-C")
            .arg(&tree),
    )?;
    drop(step);

    let step = Step::begin(cache, "guest kernel: configure")?;
    let wanted = work.join("wanted.config");
    fs::write(&wanted, fragments)?;
    step.run(make(&tree).arg(format!("KCONFIG_ALLCONFIG={}", wanted.display())).arg("allnoconfig"))?;
    let got = fs::read_to_string(tree.join(".config"))?;
    let unmet = unmet(fragments, &got);
    if !unmet.is_empty() {
        bail!("the kernel's own rules overrule kernel-config/: {}", unmet.join("; "));
    }
    drop(step);

    let step = Step::begin(cache, "guest kernel: compile")?;
    let jobs = std::thread::available_parallelism().map_or(2, usize::from);
    step.run(make(&tree).arg(format!("-j{jobs}")).arg("vmlinux"))?;
    // The symbol table is never loaded; System.map has the same for whoever reads an oops.
    step.run(Command::new("strip").arg("-s").arg("-o").arg(out.join("vmlinux")).arg(tree.join("vmlinux")))?;
    fs::copy(tree.join("System.map"), out.join("System.map"))?;
    fs::write(out.join("config"), got)?;
    fs::write(out.join("vmlinux.sha256"), digest::of_file(&out.join("vmlinux"))?)?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
}

fn make(tree: &Path) -> Command {
    let mut make = Command::new("make");
    make.current_dir(tree).arg("ARCH=x86_64").envs(FIXED.iter().copied()).env("LC_ALL", "C");
    // What an outer make or cargo exports must not leak into this build.
    for name in ["MAKEFLAGS", "MFLAGS", "CFLAGS", "LDFLAGS", "KBUILD_OUTPUT"] {
        make.env_remove(name);
    }
    make
}

/// One line of a configuration file: an option and its value, `n` for "is not set".
fn option(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    if let Some(name) = line.strip_prefix("# ").and_then(|rest| rest.strip_suffix(" is not set")) {
        return Some((name, "n"));
    }
    line.split_once('=').filter(|(name, _)| name.starts_with("CONFIG_"))
}

/// The requested options that did not come out as requested.
fn unmet(wanted: &str, got: &str) -> Vec<String> {
    let got: std::collections::HashMap<&str, &str> = got.lines().filter_map(option).collect();
    wanted
        .lines()
        .filter_map(option)
        .filter_map(|(name, value)| {
            let real = got.get(name).copied().unwrap_or("n");
            (real != value).then(|| format!("{name} is {real} where {value} was asked for"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_did_not_take_is_named() {
        let wanted = "# why\nCONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=\"x\"\nCONFIG_D=y\n";
        let got = "CONFIG_A=y\nCONFIG_B=y\nCONFIG_C=\"x\"\n# CONFIG_D is not set\n";
        assert_eq!(
            unmet(wanted, got),
            ["CONFIG_B is y where n was asked for", "CONFIG_D is n where y was asked for"]
        );
    }

    #[test]
    fn an_option_that_is_absent_counts_as_off() {
        assert!(unmet("# CONFIG_PCI is not set\n", "").is_empty());
        assert_eq!(unmet("CONFIG_NEW=y\n", "").len(), 1);
    }
}
