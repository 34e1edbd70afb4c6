//! `cargo xtask bench`: the benchmark, where guests can run.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

use crate::cache::Cache;
use crate::kvmfit::{Guests, Place};
use crate::{build, host};

/// Far more than a hundred rounds take in the lab.
const SECONDS: u64 = 7200;

#[derive(Debug, Args)]
pub struct Options {
    /// For the benchmark: see `cargo xtask bench -- --help`
    #[arg(last = true)]
    arguments: Vec<String>,
    /// Another monitor to measure, by its binary: `firecracker=PATH`
    #[arg(long, value_name = "NAME=PATH")]
    peer: Vec<String>,
    /// Counted rounds; each starts every system once, in turn
    #[arg(long, default_value_t = 20)]
    runs: u32,
}

pub fn run(cache: &Cache, options: &Options) -> Result<ExitCode> {
    host::need_root("running guests")?;
    host::need(cache, &[host::RUN, host::BENCH].concat())?;
    let place = Place::choose();
    let prefix = build::all(cache)?;
    let program = build::release(cache, "bivouac-bench", "bivouac-bench")?;
    let target = build::target_dir()?;
    let folder = target.join("bench");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let json = folder.join("latest.json");

    let mut shared = vec![target];
    let mut arguments = vec!["--json".to_owned(), json.display().to_string()];
    arguments.extend(["--runs".to_owned(), options.runs.to_string()]);
    for peer in &options.peer {
        if let Some((name, path)) = peer.split_once('=') {
            // The lab sees this machine's files at the same paths.
            let path = PathBuf::from(path).canonicalize().with_context(|| path.to_owned())?;
            arguments.extend(["--peer".to_owned(), format!("{name}={}", path.display())]);
            shared.extend(path.parent().map(std::path::Path::to_owned));
        } else {
            arguments.extend(["--peer".to_owned(), peer.clone()]);
        }
    }
    arguments.extend(options.arguments.iter().cloned());
    place.run(
        cache,
        &Guests {
            program: &program,
            arguments: &arguments,
            env: &[("BIVOUAC_PREFIX", prefix.display().to_string())],
            shared: &shared,
            retryable: false,
            seconds: SECONDS,
        },
    )
}
