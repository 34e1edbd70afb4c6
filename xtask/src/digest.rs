//! SHA-256, by which cached things are known.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

/// Of several texts, each with its length, so that moving a byte from one to the next changes the result.
pub fn of_parts<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Of a file. By coreutils, since this program is usually built without optimization and images are large.
pub fn of_file(path: &Path) -> Result<String> {
    let output = Command::new("sha256sum").arg("--").arg(path).output().context("cannot start sha256sum")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    match text.trim_start_matches('\\').split_whitespace().next() {
        Some(digest) if output.status.success() => Ok(digest.to_owned()),
        _ => bail!("cannot read {}: {}", path.display(), String::from_utf8_lossy(&output.stderr).trim()),
    }
}

/// Enough of a digest for a folder's name.
pub fn short(digest: &str) -> &str {
    digest.get(..16).unwrap_or(digest)
}
