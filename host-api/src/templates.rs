//! Templates as they lie on disk: `<prefix>/templates/<name>/{rootfs.erofs,template.toml}`.
//!
//! A version is named by the digest of its image. Creating never builds or fetches anything.

use crate::sync::lock;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const IMAGE: &str = "rootfs.erofs";
const MANIFEST: &str = "template.toml";

/// What `template.toml` says. Every field but none is required.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
struct Manifest {
    name: Option<String>,
    description: String,
    /// `sha256:<hex>` of the image, written by whoever built it; else it is computed once per image.
    digest: Option<String>,
    vcpus: u32,
    memory_mib: u32,
    disk_mib: u32,
    user: String,
    workdir: String,
    env: BTreeMap<String, String>,
}

impl Default for Manifest {
    fn default() -> Self {
        Self {
            name: None,
            description: String::new(),
            digest: None,
            vcpus: 1,
            memory_mib: 256,
            disk_mib: 1024,
            user: "1000".to_owned(),
            workdir: "/".to_owned(),
            env: BTreeMap::new(),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Template {
    pub name: String,
    /// `ver_` and the first 26 hex digits of the image's digest.
    pub version: String,
    /// `sha256:<hex>` of the image.
    pub digest: String,
    pub description: String,
    pub vcpus: u32,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub user: String,
    pub workdir: String,
    pub env: BTreeMap<String, String>,
    pub image: PathBuf,
    pub image_bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    #[error("there is no template `{0}`")]
    NotFound(String),
    #[error("template `{name}` cannot be used: {why}")]
    Broken { name: String, why: String },
}

/// Which file, in which state: a template is read again only when one of its files changed.
type Stamp = (u64, u64, i64, i64, u64);

/// Manifest and image as they were, and what was read from them.
type Seen = (Stamp, Stamp, Arc<Template>);

#[derive(Debug, Clone)]
pub struct Templates {
    folder: PathBuf,
    seen: Arc<Mutex<HashMap<String, Seen>>>,
}

impl Templates {
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, seen: Arc::default() }
    }

    /// Names, in order.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&self.folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.path().join(MANIFEST).is_file())
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| is_name(name))
            .collect();
        names.sort_unstable();
        names
    }

    /// Reads what changed since the last time, and nothing else. May block for as long as hashing an image takes.
    pub fn get(&self, name: &str) -> Result<Arc<Template>, TemplateError> {
        if !is_name(name) {
            return Err(TemplateError::NotFound(name.to_owned()));
        }
        let folder = self.folder.join(name);
        let (manifest, image) = (folder.join(MANIFEST), folder.join(IMAGE));
        let broken = |why: String| TemplateError::Broken { name: name.to_owned(), why };
        let stamps = match (stamp(&manifest), stamp(&image)) {
            (Ok(manifest), Ok(image)) => (manifest, image),
            (Err(e), _) if e.kind() == io::ErrorKind::NotFound => {
                return Err(TemplateError::NotFound(name.to_owned()));
            }
            (Err(e), _) => return Err(broken(format!("{}: {e}", manifest.display()))),
            (_, Err(e)) => return Err(broken(format!("{}: {e}", image.display()))),
        };
        if let Some((_, _, template)) = lock(&self.seen).get(name).filter(|seen| (seen.0, seen.1) == stamps) {
            return Ok(Arc::clone(template));
        }
        let template = Arc::new(read(name, &manifest, &image).map_err(broken)?);
        lock(&self.seen).insert(name.to_owned(), (stamps.0, stamps.1, Arc::clone(&template)));
        Ok(template)
    }
}

fn read(name: &str, manifest: &Path, image: &Path) -> Result<Template, String> {
    let text = fs::read_to_string(manifest).map_err(|e| format!("{}: {e}", manifest.display()))?;
    let told: Manifest = toml::from_str(&text).map_err(|e| format!("{}: {e}", manifest.display()))?;
    if told.name.as_deref().is_some_and(|told| told != name) {
        return Err(format!("{} names another template", manifest.display()));
    }
    let digest = match told.digest {
        Some(digest) if digest.strip_prefix("sha256:").is_some_and(is_sha256) => digest,
        Some(digest) => {
            return Err(format!("{}: digest `{digest}` is not sha256:<64 hex>", manifest.display()));
        }
        None => hash(image).map_err(|e| format!("{}: {e}", image.display()))?,
    };
    let image_bytes = fs::metadata(image).map_err(|e| format!("{}: {e}", image.display()))?.len();
    let version: String = digest.trim_start_matches("sha256:").chars().take(26).collect();
    Ok(Template {
        name: name.to_owned(),
        version: format!("ver_{version}"),
        digest,
        description: told.description,
        vcpus: told.vcpus,
        memory_mib: told.memory_mib,
        disk_mib: told.disk_mib,
        user: told.user,
        workdir: told.workdir,
        env: told.env,
        image: image.to_owned(),
        image_bytes,
    })
}

fn hash(path: &Path) -> io::Result<String> {
    let mut file = fs::File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n = file.read(&mut buffer)?;
        match buffer.get(..n) {
            None | Some([]) => return Ok(format!("sha256:{}", crate::auth::hex(&hasher.finalize()))),
            Some(data) => hasher.update(data),
        }
    }
}

fn stamp(path: &Path) -> io::Result<Stamp> {
    let m = fs::metadata(path)?;
    Ok((m.dev(), m.ino(), m.mtime(), m.mtime_nsec(), m.len()))
}

fn is_sha256(hex: &str) -> bool {
    hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Lower case letters, digits, `-`, `_` and `.`, not starting with a dot: safe as a file name.
fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_what_its_folder_says_and_its_version_is_its_digest() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("python");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(IMAGE), b"image").unwrap();
        fs::write(folder.join(MANIFEST), "memory_mib = 512\nuser = \"runner\"\n[env]\nLANG = \"C.UTF-8\"\n")
            .unwrap();
        let templates = Templates::new(dir.path().to_owned());

        let first = templates.get("python").unwrap();
        assert_eq!((first.memory_mib, first.vcpus, first.user.as_str()), (512, 1, "runner"));
        assert!(Arc::ptr_eq(&first, &templates.get("python").unwrap()));

        fs::write(folder.join(IMAGE), b"another image").unwrap();
        assert_ne!(templates.get("python").unwrap().version, first.version);
        assert_eq!(templates.names(), ["python"]);
    }

    #[test]
    fn names_that_are_paths_are_no_templates() {
        let templates = Templates::new(PathBuf::from("/"));
        for name in ["..", "../etc", "", "a/b", ".hidden", "Python"] {
            assert!(matches!(templates.get(name), Err(TemplateError::NotFound(_))), "{name}");
        }
    }
}
