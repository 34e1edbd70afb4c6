//! `cargo xtask bench`: how long a machine takes to be of use and what it costs, ours and its peers' in one run.
//!
//! Every system boots the same kernel with the same root image and a copy of the same disk, one processor and the same
//! memory, and runs the same agent, which announces itself to this program. So the clock is stopped by the same event
//! for all of them, and what differs is the monitor. Milliseconds on an emulated host mean little; their ratios and the
//! counts hold.

mod firecracker;
mod guest;
mod memory;
mod ours;
mod qemu;
mod report;
mod sample;

use anyhow::{Context, Result, bail};
use clap::Parser;
use guest::Announced;
use report::Report;
use sample::Sample;
use std::{
    path::{Path, PathBuf},
    time::Instant,
};

/// First guest address used; one for each run, since a host frees them late.
const FIRST_CID: u32 = 70_000;
/// Rounds that are not counted: they fill the page cache.
const WARM_UP: u32 = 2;

#[derive(Debug, Parser)]
#[command(about = "Benchmark of the monitor, beside its peers")]
struct Arguments {
    /// Counted rounds; each starts every system once, in turn
    #[arg(long, default_value_t = 20)]
    runs: u32,
    /// Another monitor to measure, by its binary: `firecracker=PATH`
    #[arg(long, value_name = "NAME=PATH")]
    peer: Vec<String>,
    /// Only these systems, by name
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Commands run on each machine after its first
    #[arg(long, default_value_t = 10)]
    commands: u32,
    /// Boot one machine with this on its kernel command line, print its kernel's log, and measure nothing
    #[arg(long, value_name = "PARAMETERS")]
    log: Option<String>,
    /// Where programs, kernel and templates are
    #[arg(long, env = "BIVOUAC_PREFIX")]
    prefix: PathBuf,
    /// Where to write the figures for programs
    #[arg(long)]
    json: Option<PathBuf>,
}

/// What every system is given.
#[derive(Debug, Clone)]
struct Setting {
    prefix: PathBuf,
    kernel: PathBuf,
    root: PathBuf,
    disk: PathBuf,
    folder: PathBuf,
    memory_mib: u32,
    commands: u32,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let folder = tempfile::Builder::new()
        .prefix("bench-")
        .tempdir_in(place()?)
        .context("cannot make a working folder")?;
    let prefix =
        arguments.prefix.canonicalize().context("no such prefix; build it by `cargo xtask build`")?;
    // Where sandboxes are, and not where they were built: what is timed must not wait for another file system.
    let prefix = near(&prefix, folder.path())?;
    let setting = Setting {
        kernel: prefix.join("kernel/vmlinux"),
        root: copy(&prefix.join("templates/base/rootfs.erofs"), folder.path())?,
        disk: prefix.join("scratch/ext4-1024.img"),
        folder: folder.path().to_owned(),
        memory_mib: 128,
        commands: arguments.commands,
        prefix,
    };
    let announced = Announced::listen()?;
    if let Some(parameters) = &arguments.log {
        let machine = ours::Bivouac::empty(&setting, &announced)?;
        print!("{}", machine.kernel_log(&announced, FIRST_CID, parameters).await?);
        return Ok(());
    }
    let report = measure(&arguments, &setting, &announced).await?;
    print!("{}", report.table());
    if let Some(path) = &arguments.json {
        std::fs::write(path, report.json()).with_context(|| format!("cannot write {}", path.display()))?;
        println!("\nfor programs: {}", path.display());
    }
    Ok(())
}

async fn measure(arguments: &Arguments, setting: &Setting, announced: &Announced) -> Result<Report> {
    let wanted = |name: &str| arguments.only.is_empty() || arguments.only.iter().any(|only| only == name);
    let mut report = Report::new(arguments.runs, setting.memory_mib);
    let mut cids = FIRST_CID..;
    let mut cid = || cids.next().unwrap_or(FIRST_CID);
    let peers = peers(&arguments.peer)?;
    let bivouac = ours::Bivouac::new(setting, announced, cid()).await?;
    let total = arguments.runs + WARM_UP;
    for round in 0..total {
        eprintln!("round {} of {total}", round + 1);
        let counted = round >= WARM_UP;
        let mut note = |name: &str, sample: Sample| {
            if counted {
                report.add(name, sample);
            }
        };
        if wanted("bivouac") {
            note("bivouac", bivouac.cold(announced, cid()).await.context("bivouac, cold")?);
            note("bivouac", bivouac.restore(announced, cid()).await.context("bivouac, restore")?);
        }
        if wanted("qemu-microvm") {
            note("qemu-microvm", qemu::cold(setting, announced, cid()).await.context("qemu-microvm, cold")?);
        }
        for (name, path) in peers.iter().filter(|(name, _)| wanted(name)) {
            let sample = firecracker::cold(setting, path, cid()).await;
            note(name, sample.with_context(|| format!("{name}, cold"))?);
        }
    }
    Ok(report)
}

fn peers(given: &[String]) -> Result<Vec<(String, PathBuf)>> {
    given
        .iter()
        .map(|peer| {
            let (name, path) = peer.split_once('=').with_context(|| format!("{peer}: give NAME=PATH"))?;
            if name != "firecracker" {
                bail!("{name}: this benchmark can drive firecracker");
            }
            Ok((name.to_owned(), PathBuf::from(path).canonicalize().context(path.to_owned())?))
        })
        .collect()
}

/// On the file system that sandboxes are on.
fn place() -> Result<PathBuf> {
    let folder = PathBuf::from("/var/lib/bivouac");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// A copy of what machines are made from.
fn near(prefix: &Path, folder: &Path) -> Result<PathBuf> {
    let copied = folder.join("prefix");
    for (part, file) in [("bin", "bivouac-vmm"), ("kernel", "vmlinux"), ("scratch", "ext4-1024.img")] {
        let to = copied.join(part);
        std::fs::create_dir_all(&to)?;
        qemu::copy(&prefix.join(part).join(file), &to.join(file))?;
    }
    std::os::unix::fs::symlink(prefix.join("templates"), copied.join("templates"))?;
    Ok(copied)
}

fn copy(file: &Path, folder: &Path) -> Result<PathBuf> {
    let to = folder.join(file.file_name().context("a file without a name")?);
    std::fs::copy(file, &to).with_context(|| format!("cannot copy {}", file.display()))?;
    Ok(to)
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}
