//! `cargo xtask demo`: everything that has to be there, and then the main job, played where guests can run.

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use crate::cache::Cache;
use crate::kvmfit::{Guests, Place};
use crate::{build, host, repository};

/// Far more than the demo takes in the lab.
const SECONDS: u64 = 900;

pub fn run(cache: &Cache) -> Result<ExitCode> {
    host::need(cache, host::RUN)?;
    let place = Place::choose();
    let prefix = build::all(cache)?;
    let program = build::release(cache, "bivouac-tests", "bivouac-demo")?;
    place.run(
        cache,
        &Guests {
            program: &program,
            arguments: &[],
            env: &[("BIVOUAC_PREFIX", prefix.display().to_string())],
            shared: &[build::target_dir()?],
            retryable: true,
            seconds: SECONDS,
        },
    )
}
