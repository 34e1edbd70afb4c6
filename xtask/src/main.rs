//! `cargo xtask`: everything a person does to this repository by hand.

mod bench;
mod build;
mod cache;
mod check;
mod deb;
mod demo;
mod digest;
mod disk;
mod fuzz;
mod host;
mod kernel;
mod kvmfit;
mod lab;
mod progress;
mod rootfs;
mod tree;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::cache::Cache;

const AFTER: &str = "\
Start with `cargo xtask demo`. What a task needs is built or installed first: Debian packages, guest kernel, root
filesystems, programs. What takes long is kept in a cache outside the checkout, with a log of each step.

Environment:
  BIVOUAC_CACHE         the cache, instead of $XDG_CACHE_HOME/bivouac or ~/.cache/bivouac
  BIVOUAC_FORCE_KVM=1   take /dev/kvm as fit without looking
  BIVOUAC_FORCE_LAB=1   run guests in the lab, whatever /dev/kvm can do";

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about, version, after_help = AFTER)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Set everything up, then play the main job in the terminal
    Demo,
    /// Run every check and test (`.ci/run` does the same)
    Test(check::Options),
    /// Measure the monitor beside its peers; figures for programs go to target/bench/latest.json
    Bench(bench::Options),
    /// Try at random what a guest or a peer may hand over
    Fuzz(fuzz::Options),
    /// Build the guest kernel and print the path of its vmlinux
    Kernel,
    /// Build the templates' root filesystems and print the folder of each
    Rootfs {
        /// Only this one
        name: Option<String>,
        /// Build each twice from nothing, and fail if the two differ
        #[arg(long)]
        verify_reproducible: bool,
    },
    /// Build all programs, kernel and root filesystems, and print the folder they are run from
    Build,
    /// Run a command on an emulated bare-metal host with a working KVM
    #[command(after_help = lab::AFTER)]
    Lab(lab::Options),
    /// The lab's first process
    #[command(hide = true)]
    LabInside,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(why) => {
            eprintln!("xtask: {why:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode> {
    if matches!(arguments.task, Task::LabInside) {
        lab::inside::run()?;
    }
    let cache = Cache::open()?;
    match &arguments.task {
        Task::Kernel => println!("{}", kernel::vmlinux(&cache)?.display()),
        Task::Rootfs { name, verify_reproducible } => {
            for template in rootfs::templates(name.as_deref())? {
                if *verify_reproducible {
                    template.verify_reproducible(&cache)?;
                }
                println!("{}", template.image(&cache)?.display());
            }
        }
        Task::Build => println!("{}", build::all(&cache)?.display()),
        Task::Lab(options) => return lab::run(&cache, options),
        Task::Demo => {
            host::need_root("running guests")?;
            return demo::run(&cache);
        }
        Task::Test(options) => return check::run(&cache, options),
        Task::Bench(options) => return bench::run(&cache, options),
        Task::Fuzz(options) => return fuzz::run(&cache, options),
        Task::LabInside => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Root of the checkout that this program was built from.
fn repository() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map_or(manifest.clone(), PathBuf::from)
}
