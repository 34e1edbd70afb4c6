//! `cargo xtask`: everything a person does to this repository by hand.

mod cache;
mod deb;
mod digest;
mod host;
mod kernel;
mod lab;
mod progress;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::cache::Cache;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about, version)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Build the guest kernel and print the path of its vmlinux
    Kernel,
    /// Run a command on an emulated bare-metal host with a working KVM
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
        Task::Lab(options) => return lab::run(&cache, options),
        Task::LabInside => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Root of the checkout that this program was built from.
fn repository() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().map_or(manifest.clone(), PathBuf::from)
}
