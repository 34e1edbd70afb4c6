//! Where built things are kept: outside the checkout, so that a second clone builds nothing again.
//!
//! Whatever has a name here is whole. It was made under `building/`, with a lock held so that two xtasks never make the
//! same thing twice, and renamed into place; an interrupted build leaves nothing but a folder that the next one removes.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use rustix::fs::{FlockOperation, flock};

#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

/// Held while something is being made; released when dropped, or by the kernel when the process ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Cache {
    /// `$BIVOUAC_CACHE`, else `$XDG_CACHE_HOME/bivouac`, else `~/.cache/bivouac`.
    pub fn open() -> Result<Self> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = set("BIVOUAC_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("bivouac")))
            .or_else(|| set("HOME").map(|dir| dir.join(".cache/bivouac")))
            .ok_or_else(|| anyhow!("no place for the cache: set BIVOUAC_CACHE or HOME"))?;
        fs::create_dir_all(&root).with_context(|| format!("cannot make the cache {}", root.display()))?;
        let root = root.canonicalize().with_context(|| format!("cannot resolve {}", root.display()))?;
        Ok(Self { root })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A file for the full output of one step. Logs of earlier runs of the same step are overwritten.
    pub fn log_file(&self, step: &str) -> Result<PathBuf> {
        let dir = self.root.join("log");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir.join(format!("{}.log", file_name(step))))
    }

    /// Waits for, then holds, the lock `name`.
    pub fn lock(&self, name: &str) -> Result<Lock> {
        let dir = self.root.join("lock");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let path = dir.join(file_name(name));
        let file = File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            eprintln!("xtask: waiting for another xtask that is making {name}");
            flock(&file, FlockOperation::LockExclusive)
                .with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(Lock { _file: file })
    }

    /// The folder `name` (relative, may have slashes), which `fill` makes if it is not there yet.
    ///
    /// `fill` is given a fresh empty folder on the same filesystem. If it fails, nothing appears under `name`.
    pub fn folder(&self, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let done = self.root.join(name);
        if done.is_dir() {
            return Ok(done);
        }
        let _lock = self.lock(name)?;
        if done.is_dir() {
            return Ok(done);
        }
        let making = self.root.join("building").join(file_name(name));
        remove(&making)?;
        fs::create_dir_all(&making).with_context(|| format!("cannot make {}", making.display()))?;
        let filled = fill(&making);
        if let Err(why) = filled {
            remove(&making)?;
            return Err(why);
        }
        let parent = done.parent().unwrap_or(&self.root);
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        fs::rename(&making, &done)
            .with_context(|| format!("cannot rename {} to {}", making.display(), done.display()))?;
        Ok(done)
    }

    /// The single file `name`, made by `fill` if it is not there yet.
    pub fn file(&self, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let done = self.root.join(name);
        if done.is_file() {
            return Ok(done);
        }
        let _lock = self.lock(name)?;
        if done.is_file() {
            return Ok(done);
        }
        let dir = self.root.join("building");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let making = dir.join(file_name(name));
        remove(&making)?;
        fill(&making)?;
        let parent = done.parent().unwrap_or(&self.root);
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        fs::rename(&making, &done)
            .with_context(|| format!("cannot rename {} to {}", making.display(), done.display()))?;
        Ok(done)
    }
}

/// Removes a file or folder if it is there.
pub fn remove(path: &Path) -> Result<()> {
    let result = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    };
    result.with_context(|| format!("cannot remove {}", path.display()))
}

/// A name for humans as the name of one file.
fn file_name(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-+~".contains(c) { c } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> Cache {
        let root = std::env::temp_dir().join(format!("xtask-cache-{name}-{}", std::process::id()));
        remove(&root).unwrap();
        fs::create_dir_all(&root).unwrap();
        Cache { root }
    }

    #[test]
    fn a_failed_build_leaves_nothing_under_its_name() {
        let cache = scratch("failed");
        let result = cache.folder("a/b", |dir| {
            fs::write(dir.join("half"), "x")?;
            anyhow::bail!("no luck")
        });
        assert!(result.is_err());
        assert!(!cache.root.join("a/b").exists());
        assert!(!cache.root.join("building/a-b").exists());
        remove(&cache.root).unwrap();
    }

    #[test]
    fn what_is_there_is_not_built_again() {
        let cache = scratch("once");
        let made = cache.folder("a", |dir| Ok(fs::write(dir.join("whole"), "x")?)).unwrap();
        assert!(made.join("whole").exists());
        let again = cache.folder("a", |_| anyhow::bail!("built twice")).unwrap();
        assert_eq!(made, again);
        remove(&cache.root).unwrap();
    }

    #[test]
    fn a_leftover_of_an_interrupted_build_is_not_part_of_the_next() {
        let cache = scratch("leftover");
        fs::create_dir_all(cache.root.join("building/a")).unwrap();
        fs::write(cache.root.join("building/a/stale"), "x").unwrap();
        let made = cache.folder("a", |dir| Ok(fs::write(dir.join("fresh"), "x")?)).unwrap();
        assert!(!made.join("stale").exists());
        remove(&cache.root).unwrap();
    }
}
