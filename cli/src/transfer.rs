//! `bivouac cp`: one file, in or out, of any size.

use crate::args::Format;
use crate::client::{Backoff, Client, Failure, quoted};
use crate::sandboxes::address;
use crate::show;
use futures_util::StreamExt;
use reqwest::{Body, Method};
use serde_json::json;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio_util::io::ReaderStream;

/// Attempts at an upload from a file; from a pipe there is one.
const ATTEMPTS: u32 = 4;

#[derive(Debug, PartialEq, Eq)]
enum Place {
    Local(PathBuf),
    /// Standard input or output.
    Stream,
    Guest {
        sandbox: String,
        path: String,
    },
}

fn place(text: &str) -> Place {
    match text.split_once(':') {
        // A local file may have a colon in its name; a sandbox's id never looks like anything else.
        Some((sandbox, path)) if sandbox.starts_with("sb_") && !sandbox.contains('/') => {
            Place::Guest { sandbox: sandbox.to_owned(), path: path.to_owned() }
        }
        _ if text == "-" => Place::Stream,
        _ => Place::Local(PathBuf::from(text)),
    }
}

pub async fn copy(
    client: &Client,
    from: &str,
    to: &str,
    user: Option<String>,
    format: Format,
) -> Result<u8, Failure> {
    let bytes = match (place(from), place(to)) {
        (Place::Guest { sandbox, path }, Place::Local(target)) => {
            download_to(client, &sandbox, &path, &target, user).await?
        }
        (Place::Guest { sandbox, path }, Place::Stream) => {
            let bytes = download(client, &sandbox, &path, user, &mut tokio::io::stdout()).await?;
            return Ok(u8::from(bytes == u64::MAX));
        }
        (source @ (Place::Local(_) | Place::Stream), Place::Guest { sandbox, path }) => {
            upload(client, &source, &sandbox, &path, user).await?
        }
        (Place::Guest { .. }, Place::Guest { .. }) => {
            return Err(Failure::Local(
                "both places are in sandboxes: copy by way of a local file".to_owned(),
            ));
        }
        _ => return Err(Failure::Local("one of the two places must be in a sandbox, as ID:PATH".to_owned())),
    };
    if format == Format::Json {
        show::json(&json!({ "from": from, "to": to, "bytes": bytes }))?;
    }
    Ok(0)
}

fn files(sandbox: &str, path: &str, user: Option<&str>) -> String {
    let user = user.map(|user| format!("&user={}", quoted(user))).unwrap_or_default();
    format!("{}/files?path={}{user}", address(sandbox), quoted(path))
}

/// A path that ends in `/`, or is nothing, takes the name from the other side.
fn with_name(path: &str, name: Option<&str>) -> Result<String, Failure> {
    match name {
        _ if !(path.is_empty() || path.ends_with('/')) => Ok(path.to_owned()),
        Some(name) => Ok(format!("{path}{name}")),
        None => Err(Failure::Local("give the file a name after SANDBOX:".to_owned())),
    }
}

async fn upload(
    client: &Client,
    source: &Place,
    sandbox: &str,
    path: &str,
    user: Option<String>,
) -> Result<u64, Failure> {
    let Place::Local(local) = source else {
        let path = with_name(path, None)?;
        let body = Body::wrap_stream(ReaderStream::new(tokio::io::stdin()));
        let request = client.request(Method::PUT, &files(sandbox, &path, user.as_deref())).body(body);
        return client.once(request).await.map(|_| 0);
    };
    let named = |cause: std::io::Error| Failure::Local(format!("{}: {cause}", local.display()));
    let path = with_name(path, local.file_name().and_then(|name| name.to_str()))?;
    let mut backoff = Backoff::new(ATTEMPTS);
    loop {
        let file = tokio::fs::File::open(local).await.map_err(named)?;
        let meta = file.metadata().await.map_err(named)?;
        if meta.is_dir() {
            return Err(Failure::Local(format!("{} is a folder: copy files one by one", local.display())));
        }
        let mode = meta.permissions().mode() & 0o777;
        let address = format!("{}&mode={mode:04o}", files(sandbox, &path, user.as_deref()));
        let request = client.request(Method::PUT, &address).header("content-length", meta.len());
        let request = request.body(Body::wrap_stream(ReaderStream::with_capacity(file, 256 << 10)));
        match client.once(request).await {
            Ok(_) => return Ok(meta.len()),
            Err(failure) => backoff.pause(failure).await?,
        }
    }
}

async fn download_to(
    client: &Client,
    sandbox: &str,
    path: &str,
    target: &Path,
    user: Option<String>,
) -> Result<u64, Failure> {
    let target = if target.is_dir() {
        let name = path.rsplit('/').next().filter(|name| !name.is_empty() && *name != ".." && *name != ".");
        target.join(name.ok_or_else(|| Failure::Local(format!("`{path}` has no file name")))?)
    } else {
        target.to_owned()
    };
    // Beside, and renamed once it is whole: what was there is not lost to a download that breaks off.
    let mut beside = target.clone().into_os_string();
    beside.push(format!(".{}", ulid::Ulid::generate().to_string().to_ascii_lowercase()));
    let beside = PathBuf::from(beside);
    let named = |cause: std::io::Error| Failure::Local(format!("{}: {cause}", target.display()));
    let loaded = async {
        let mut file = tokio::fs::File::create_new(&beside).await.map_err(named)?;
        let bytes = download(client, sandbox, path, user, &mut file).await?;
        file.flush().await.map_err(named)?;
        tokio::fs::rename(&beside, &target).await.map_err(named)?;
        Ok(bytes)
    }
    .await;
    if loaded.is_err() {
        let _ = tokio::fs::remove_file(&beside).await;
    }
    loaded
}

async fn download(
    client: &Client,
    sandbox: &str,
    path: &str,
    user: Option<String>,
    out: &mut (impl AsyncWrite + Unpin),
) -> Result<u64, Failure> {
    let address = files(sandbox, path, user.as_deref());
    let response = client.send(|| client.request(Method::GET, &address)).await?;
    let mut body = response.bytes_stream();
    let mut bytes = 0_u64;
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|e| client.unreachable(&e))?;
        out.write_all(&piece).await?;
        bytes = bytes.saturating_add(u64::try_from(piece.len()).unwrap_or(0));
    }
    out.flush().await?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_in_a_sandbox_only_if_it_names_one() {
        let guest = |sandbox: &str, path: &str| Place::Guest { sandbox: sandbox.into(), path: path.into() };
        assert_eq!(place("sb_1:/etc/hosts"), guest("sb_1", "/etc/hosts"));
        assert_eq!(place("sb_1:"), guest("sb_1", ""));
        assert_eq!(place("a:b"), Place::Local("a:b".into()));
        assert_eq!(place("./sb_1:x"), Place::Local("./sb_1:x".into()));
        assert_eq!(place("-"), Place::Stream);
    }

    #[test]
    fn a_folder_takes_the_file_s_name() {
        assert_eq!(with_name("", Some("a.py")).unwrap(), "a.py");
        assert_eq!(with_name("/opt/", Some("a.py")).unwrap(), "/opt/a.py");
        assert_eq!(with_name("/opt/b", Some("a.py")).unwrap(), "/opt/b");
        assert!(with_name("", None).is_err());
    }
}
