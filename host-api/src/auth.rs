//! Who is asking: keys of the form `biv_<key id>_<secret>`.
//!
//! The organization comes from the key and from nowhere else. Only a hash of a secret is stored, and it is compared in
//! constant time. The secret is 256 random bits, so one round of SHA-256 hides it as well as a slow hash would.

use crate::lifecycle::UnixMs;
use crate::store::{NewKey, Store, StoreError};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use subtle::ConstantTimeEq;

const PREFIX: &str = "biv_";
const ID_BYTES: usize = 8;
const SECRET_BYTES: usize = 32;
/// The organization of the key that the first start makes.
pub const FIRST_ORG: &str = "default";

/// Somebody who may ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub key_id: String,
    pub org: String,
    pub scopes: String,
}

#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("admin key file {path} failed: {cause}")]
    File { path: String, cause: io::Error },
    #[error("no random bytes: {0}")]
    Random(rustix::io::Errno),
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn random(len: usize) -> Result<Vec<u8>, AuthError> {
    let mut bytes = vec![0_u8; len];
    let mut have = 0;
    while let Some(free) = bytes.get_mut(have..).filter(|free| !free.is_empty()) {
        let got = rustix::rand::getrandom(free, rustix::rand::GetRandomFlags::empty())
            .map_err(AuthError::Random)?;
        have = have.saturating_add(got);
    }
    Ok(bytes)
}

/// Random bytes for a guest's pool.
pub fn entropy() -> Vec<u8> {
    // getrandom(2) does not fail for a valid buffer of this size once the host's pool is ready.
    random(64).unwrap_or_default()
}

/// A key's two parts, if it has the form of one.
fn split(key: &str) -> Option<(&str, &str)> {
    let (id, secret) = key.strip_prefix(PREFIX)?.split_once('_')?;
    let is_hex = |text: &str| text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    (id.len() == ID_BYTES * 2 && secret.len() == SECRET_BYTES * 2 && is_hex(id) && is_hex(secret))
        .then_some((id, secret))
}

fn hash(secret: &str) -> Vec<u8> {
    Sha256::digest(secret.as_bytes()).to_vec()
}

/// The identity behind a key. None for any that is not valid now, without saying why.
pub async fn identify(store: &Store, key: &str, now: UnixMs) -> Result<Option<Identity>, StoreError> {
    let Some((id, secret)) = split(key) else { return Ok(None) };
    let row = store.key(id).await?;
    // A key that does not exist takes as long as one that does.
    let stored = row.as_ref().map_or_else(|| hash(""), |row| row.secret_hash.clone());
    let same = bool::from(hash(secret).as_slice().ct_eq(stored.as_slice()));
    let Some(row) = row.filter(|_| same) else { return Ok(None) };
    let over = |at: Option<i64>| at.is_some_and(|at| at <= now);
    if over(row.expires_at) || over(row.revoked_at) {
        return Ok(None);
    }
    Ok(Some(Identity { key_id: row.id, org: row.org, scopes: row.scopes }))
}

/// Makes the first key, if there is none yet, and returns it to be shown once. The file is written first: a start that
/// is cut short between the two finds the file and records its key.
pub async fn first_key(store: &Store, file: &Path, now: UnixMs) -> Result<Option<String>, AuthError> {
    if store.has_keys().await? {
        return Ok(None);
    }
    let failed = |cause| AuthError::File { path: file.display().to_string(), cause };
    let kept = match fs::read_to_string(file) {
        Ok(text) => split(text.trim()).is_some().then(|| text.trim().to_owned()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(failed(e)),
    };
    let key = match kept {
        Some(key) => key,
        None => {
            let key = format!("{PREFIX}{}_{}", hex(&random(ID_BYTES)?), hex(&random(SECRET_BYTES)?));
            write_private(file, &key).map_err(failed)?;
            key
        }
    };
    if let Some((id, secret)) = split(&key) {
        let secret_hash = hash(secret);
        let new =
            NewKey { id, org: FIRST_ORG, name: "admin", secret_hash: &secret_hash, scopes: "admin", at: now };
        store.add_key(&new).await?;
    }
    Ok(Some(key))
}

/// Written beside and renamed, readable by its owner only.
fn write_private(path: &Path, text: &str) -> io::Result<()> {
    let beside = path.with_extension("key.new");
    let _ = fs::remove_file(&beside);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
    file.write_all(text.as_bytes())?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    fs::rename(&beside, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    async fn store(dir: &Path) -> Store {
        Store::open(&dir.join("store.db")).await.unwrap()
    }

    #[tokio::test]
    async fn the_first_start_makes_one_key_that_opens_and_is_stored_as_a_hash() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path()).await;
        let file = dir.path().join("admin.key");
        let key = first_key(&store, &file, 1).await.unwrap().unwrap();
        assert_eq!(first_key(&store, &file, 1).await.unwrap(), None);
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(identify(&store, &key, 2).await.unwrap().unwrap().org, FIRST_ORG);
        let secret = key.rsplit('_').next().unwrap();
        let bytes = fs::read(dir.path().join("store.db-wal")).unwrap();
        assert!(!bytes.windows(secret.len()).any(|w| w == secret.as_bytes()));
    }

    #[tokio::test]
    async fn a_wrong_key_is_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path()).await;
        let key = first_key(&store, &dir.path().join("admin.key"), 1).await.unwrap().unwrap();
        let last = if key.ends_with('0') { "1" } else { "0" };
        let off_by_one = format!("{}{last}", &key[..key.len() - 1]);
        for wrong in ["", "biv_", "biv_x_y", &off_by_one, &key.to_uppercase()] {
            assert_eq!(identify(&store, wrong, 2).await.unwrap(), None, "{wrong}");
        }
    }

    #[tokio::test]
    async fn a_start_cut_short_after_the_file_keeps_the_key_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("admin.key");
        let key = {
            let other = tempfile::tempdir().unwrap();
            first_key(&store(other.path()).await, &file, 1).await.unwrap().unwrap()
        };
        assert_eq!(first_key(&store(dir.path()).await, &file, 1).await.unwrap(), Some(key));
    }
}
