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
    let code = place.run(
        cache,
        &Guests {
            program: &program,
            arguments: &[],
            env: &env(&prefix),
            shared: &[build::target_dir()?],
            retryable: true,
            seconds: SECONDS,
        },
    )?;
    if code == ExitCode::SUCCESS {
        println!("\nThe same by hand:\n");
        for line in by_hand(&place, &prefix) {
            println!("    {line}");
        }
    }
    Ok(code)
}

fn env(prefix: &Path) -> Vec<(&'static str, String)> {
    let mut env = vec![("BIVOUAC_PREFIX", prefix.display().to_string())];
    if std::io::stdout().is_terminal() {
        env.push(("BIVOUAC_COLOR", "1".to_owned()));
        let size = rustix::termios::tcgetwinsize(std::io::stdout());
        env.extend(size.ok().map(|size| ("COLUMNS", size.ws_col.to_string())));
    }
    env
}

/// Three lines that a user types: to a host, to a daemon, to a result.
fn by_hand(place: &Place, prefix: &Path) -> [String; 3] {
    let bin = prefix.join("bin");
    let bin = bin.strip_prefix(repository()).map_or_else(|_| bin.clone(), Path::to_path_buf);
    let shell = match place {
        Place::Here => "sudo -s",
        Place::Lab(_) => "cargo xtask lab -- bash",
    };
    [
        shell.to_owned(),
        format!("{}/bivouacd &", bin.display()),
        format!("{}/bivouac run python -- python3 -c 'print(6 * 7)'", bin.display()),
    ]
}
