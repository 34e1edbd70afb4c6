//! Templates: one EROFS image each, with the agent in it, known by its digest.
//!
//! `<cache>/templates/<name>/<digest>/{rootfs.erofs,template.toml,packages.txt}`. The same inputs are never built
//! twice: `inputs-<hash>` leads from what went in to what came out, and `current` to what was asked for last.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::cache::Cache;
use crate::progress::Step;
use crate::tree::{self, Recipe};
use crate::{build, cache, digest, host, repository};

/// Raised when the steps below change what comes out of the same inputs.
const RECIPE: &str = "1";
/// Images of one template that are kept; a change of the agent makes a new one.
const KEPT: usize = 4;

/// A folder under `rootfs/` with a `template.toml`.
#[derive(Debug)]
pub struct Template {
    pub name: String,
    folder: PathBuf,
    manifest: toml::Table,
    recipe: Recipe,
}

/// All templates, or the one that is named.
pub fn templates(only: Option<&str>) -> Result<Vec<Template>> {
    let root = repository().join("rootfs");
    let mut names: Vec<String> = fs::read_dir(&root)
        .with_context(|| format!("cannot list {}", root.display()))?
        .filter_map(Result::ok)
        .filter(|entry| entry.path().join("template.toml").is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    if let Some(only) = only {
        if !names.iter().any(|name| name == only) {
            bail!("there is no template {only}; there are: {}", names.join(", "));
        }
        names.retain(|name| name == only);
    }
    names.iter().map(|name| Template::read(&root, name)).collect()
}

impl Template {
    fn read(root: &Path, name: &str) -> Result<Self> {
        let folder = root.join(name);
        let path = folder.join("template.toml");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let manifest: toml::Table =
            text.parse().with_context(|| format!("{} is not TOML", path.display()))?;
        let recipe = manifest.get("build").cloned().ok_or_else(|| anyhow!("it has no [build]"))?;
        let recipe = recipe.try_into().with_context(|| format!("[build] in {}", path.display()))?;
        Ok(Self { name: name.to_owned(), folder, manifest, recipe })
    }

    pub fn disk_mib(&self) -> Result<u32> {
        let size = self.manifest.get("disk_mib").and_then(toml::Value::as_integer);
        size.and_then(|size| u32::try_from(size).ok())
            .ok_or_else(|| anyhow!("template {}: disk_mib is not a number of MiB", self.name))
    }

    /// The folder with its image, which is made first if need be.
    pub fn image(&self, cache: &Cache) -> Result<PathBuf> {
        let tree = tree::get(cache, &self.name, &self.recipe)?;
        let agent = build::agent(cache)?;
        let inputs = self.inputs(&tree, &agent)?;
        let home = cache.root().join("templates").join(&self.name);
        fs::create_dir_all(&home)?;
        let known = home.join(format!("inputs-{}", digest::short(&inputs)));
        let _lock = cache.lock(&format!("template-{}", self.name))?;
        let done = match known.canonicalize() {
            Ok(done) => done,
            Err(_) => self.make(cache, &tree, &agent, &home)?,
        };
        link(&done, &known)?;
        link(&done, &home.join("current"))?;
        prune(&home, &done)?;
        Ok(done)
    }

    /// Builds the image twice from nothing, cache and all, and compares the two.
    pub fn verify_reproducible(&self, cache: &Cache) -> Result<()> {
        let agent = build::agent(cache)?;
        let once = |round: &str| -> Result<String> {
            let name = format!("verify/{}-{}-{round}", self.name, std::process::id());
            let dir = cache.folder(&name, |dir| {
                tree::make(cache, &self.recipe, dir)?;
                self.assemble(cache, &dir.join("tree.tar"), &agent, dir)
            })?;
            let digest = digest::of_file(&dir.join("rootfs.erofs"))?;
            eprintln!("{} round {round}: sha256:{digest}", self.name);
            Ok(digest)
        };
        let (first, second) = (once("1")?, once("2")?);
        if first != second {
            bail!(
                "template {} is not reproducible: compare the two folders in {}",
                self.name,
                cache.root().join("verify").display()
            );
        }
        cache::remove(&cache.root().join("verify"))
    }

    fn inputs(&self, tree: &Path, agent: &Path) -> Result<String> {
        let assemble = fs::read_to_string(repository().join("rootfs/assemble.sh"))?;
        let files = files_text(&self.folder.join("files"))?;
        let manifest = self.manifest.to_string();
        let (tree, agent) = (digest::of_file(&tree.join("tree.tar"))?, digest::of_file(agent)?);
        Ok(digest::of_parts([RECIPE, &assemble, &manifest, &files, &tree, &agent]))
    }

    fn make(&self, cache: &Cache, tree: &Path, agent: &Path, home: &Path) -> Result<PathBuf> {
        let making = cache.root().join("building").join(format!("image-{}", self.name));
        cache::remove(&making)?;
        fs::create_dir_all(&making)?;
        self.assemble(cache, &tree.join("tree.tar"), agent, &making)?;
        let digest = digest::of_file(&making.join("rootfs.erofs"))?;
        fs::copy(tree.join("packages.txt"), making.join("packages.txt"))?;
        let manifest = self.manifest_for(&digest, agent, &fs::read_to_string(tree.join("packages.txt"))?)?;
        fs::write(making.join("template.toml"), manifest)?;
        let done = home.join(&digest);
        if !done.is_dir() {
            fs::rename(&making, &done).with_context(|| format!("cannot rename to {}", done.display()))?;
        }
        cache::remove(&making)?;
        Ok(done)
    }

    fn assemble(&self, cache: &Cache, tree_tar: &Path, agent: &Path, out: &Path) -> Result<()> {
        host::need_root("making a root filesystem, whose files belong to their users,")?;
        host::need(cache, host::ROOTFS)?;
        let step = Step::begin(cache, &format!("template {}: make the image", self.name))?;
        let tree = out.join("tree");
        fs::create_dir(&tree)?;
        step.run(
            Command::new("unshare")
                .args(["--mount", "--propagation", "private"])
                .arg(repository().join("rootfs/assemble.sh"))
                .arg(tree_tar)
                .arg(self.folder.join("files"))
                .arg(agent)
                .arg(&tree)
                .arg(out.join("rootfs.erofs")),
        )?;
        Ok(fs::remove_dir(&tree)?)
    }

    /// What the daemon reads: the template's own file without `[build]`, and what the image turned out to be.
    fn manifest_for(&self, image: &str, agent: &Path, packages: &str) -> Result<String> {
        let mut manifest = self.manifest.clone();
        manifest.remove("build");
        manifest.insert("name".to_owned(), self.name.clone().into());
        manifest.insert("digest".to_owned(), format!("sha256:{image}").into());
        let mut versions = toml::Table::new();
        versions.insert("agent".to_owned(), format!("sha256:{}", digest::of_file(agent)?).into());
        for name in self.recipe.packages() {
            let version =
                packages.lines().find_map(|line| line.strip_prefix(name.as_str())?.strip_prefix(' '));
            versions.insert(name.clone(), version.unwrap_or("unknown").into());
        }
        manifest.insert("versions".to_owned(), versions.into());
        Ok(manifest.to_string())
    }
}

/// Every file below a folder, with its name and whether it can be executed.
fn files_text(folder: &Path) -> Result<String> {
    use std::os::unix::fs::PermissionsExt;
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .with_context(|| format!("cannot list {}", folder.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    paths.sort();
    let mut text = String::new();
    for path in paths {
        let found = fs::symlink_metadata(&path)?;
        if found.is_dir() {
            text += &files_text(&path)?;
            continue;
        }
        let content = if found.is_symlink() {
            fs::read_link(&path)?.display().to_string()
        } else {
            digest::of_file(&path)?
        };
        let executable = found.permissions().mode() & 0o100 != 0;
        text += &format!("{}\0{executable}\0{content}\n", path.strip_prefix(folder)?.display());
    }
    Ok(text)
}

/// Points a symbolic link at a sibling, in one step.
fn link(target: &Path, link: &Path) -> Result<()> {
    let name = target.file_name().ok_or_else(|| anyhow!("{} has no name", target.display()))?;
    let beside = link.with_extension("new");
    cache::remove(&beside)?;
    std::os::unix::fs::symlink(name, &beside)?;
    fs::rename(&beside, link).with_context(|| format!("cannot make {}", link.display()))
}

/// Removes the oldest images beyond [`KEPT`], never `keep`, and the links that led to them.
fn prune(home: &Path, keep: &Path) -> Result<()> {
    let mut images = Vec::new();
    for entry in fs::read_dir(home)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() && entry.path() != keep {
            images.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    images.sort();
    let excess = images.len().saturating_sub(KEPT - 1);
    for (_, image) in images.into_iter().take(excess) {
        cache::remove(&image)?;
    }
    for entry in fs::read_dir(home)? {
        let path = entry?.path();
        if path.is_symlink() && !path.exists() {
            cache::remove(&path)?;
        }
    }
    Ok(())
}
