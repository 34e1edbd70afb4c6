//! Requests to the daemon. One logical call keeps its request id over all its retries, and is retried only where that
//! cannot hurt: when the connection failed, or the daemon says `retryable`.

use crate::args::Connection;
use reqwest::{Method, RequestBuilder, Response};
use serde::Deserialize;
use serde_json::Value;
use std::fmt;
use std::io;
use std::path::Path;
use std::time::Duration;

/// Attempts at one call.
const ATTEMPTS: u32 = 6;
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The daemon refused or failed, and said why.
    #[error("{0}")]
    Problem(Problem),
    #[error(
        "cannot reach {server}: {cause}. Start the daemon there (`bivouacd`, as root), or give another address by \
         --server or BIVOUAC_SERVER"
    )]
    Connection { server: String, cause: String },
    /// Something on this side.
    #[error("{0}")]
    Local(String),
    #[error("output failed: {0}")]
    Output(#[from] io::Error),
    #[error("the daemon sent what bivouac does not understand: {0}")]
    Protocol(String),
}

/// A problem document, as far as it is of use here.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Problem {
    pub code: String,
    pub detail: String,
    pub retryable: bool,
    pub retry_after_ms: Option<u64>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.detail, self.code)
    }
}

#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    server: String,
    key: String,
}

/// A new idempotency key.
pub fn request_id() -> String {
    format!("cli-{}", ulid::Ulid::generate().to_string().to_ascii_lowercase())
}

impl Client {
    pub fn new(connection: &Connection) -> Result<Self, Failure> {
        let key = match &connection.key {
            Some(key) => key.clone(),
            None => std::fs::read_to_string(&connection.key_file)
                .map_err(|cause| Failure::Local(no_key(&connection.key_file, &cause)))?,
        };
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(10))
            .no_proxy()
            .build()
            .map_err(|e| Failure::Local(format!("no HTTP client: {e}")))?;
        let server = connection.server.trim_end_matches('/').to_owned();
        Ok(Self { http, server, key: key.trim().to_owned() })
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.server)).bearer_auth(&self.key)
    }

    /// One attempt; what is not a success is a failure with its reason.
    pub async fn once(&self, request: RequestBuilder) -> Result<Response, Failure> {
        let response = request.send().await.map_err(|e| self.unreachable(&e))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let problem = response.json::<Problem>().await.unwrap_or_default();
        Err(Failure::Problem(if problem.code.is_empty() {
            Problem { code: "unknown".to_owned(), detail: format!("the server answered {status}"), ..problem }
        } else {
            problem
        }))
    }

    pub fn unreachable(&self, error: &reqwest::Error) -> Failure {
        // The innermost cause is the one that says something.
        let mut cause: &dyn std::error::Error = error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        Failure::Connection { server: self.server.clone(), cause: cause.to_string() }
    }

    /// Attempts until it is answered for good.
    pub async fn send(&self, request: impl Fn() -> RequestBuilder) -> Result<Response, Failure> {
        let mut backoff = Backoff::new(ATTEMPTS);
        loop {
            match self.once(request()).await {
                Ok(response) => return Ok(response),
                Err(failure) => backoff.pause(failure).await?,
            }
        }
    }

    pub async fn json(&self, request: impl Fn() -> RequestBuilder) -> Result<Value, Failure> {
        let mut backoff = Backoff::new(ATTEMPTS);
        loop {
            // An answer that breaks off is a connection that failed.
            let failure = match self.send(&request).await?.json().await {
                Ok(value) => return Ok(value),
                Err(e) if e.is_decode() => return Err(Failure::Protocol(e.to_string())),
                Err(e) => self.unreachable(&e),
            };
            backoff.pause(failure).await?;
        }
    }

    pub async fn get(&self, path: &str) -> Result<Value, Failure> {
        self.json(|| self.request(Method::GET, path)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.json(|| self.request(Method::POST, path).json(body)).await
    }

    pub async fn delete(&self, path: &str) -> Result<Value, Failure> {
        self.json(|| self.request(Method::DELETE, path)).await
    }

    /// All pages of a list.
    pub async fn list(&self, path: &str) -> Result<Vec<Value>, Failure> {
        let mut items = Vec::new();
        let separator = if path.contains('?') { '&' } else { '?' };
        let mut next = format!("{path}{separator}limit=1000");
        loop {
            let mut page = self.get(&next).await?;
            match page["items"].take() {
                Value::Array(page) => items.extend(page),
                other => return Err(Failure::Protocol(format!("a list without items: {other}"))),
            }
            match page["next_cursor"].as_str() {
                Some(cursor) => next = format!("{path}{separator}limit=1000&cursor={cursor}"),
                None => return Ok(items),
            }
        }
    }
}

/// Why there is no key, and what to do about it.
fn no_key(file: &Path, cause: &io::Error) -> String {
    let advice = match cause.kind() {
        io::ErrorKind::NotFound => {
            "The first start of the daemon (`bivouacd`, as root) writes one there; for a daemon elsewhere, give its \
             address by --server or BIVOUAC_SERVER and a key by BIVOUAC_KEY or --key-file"
        }
        io::ErrorKind::PermissionDenied => "Run this as root, or give a key by BIVOUAC_KEY or --key-file",
        _ => "Give one by BIVOUAC_KEY or --key-file",
    };
    format!("no API key: {}: {cause}. {advice}", file.display())
}

/// Waits between attempts: longer each time, and not for ever.
#[derive(Debug)]
pub struct Backoff {
    left: u32,
    wait: Duration,
}

impl Backoff {
    pub fn new(attempts: u32) -> Self {
        Self { left: attempts, wait: BACKOFF_FIRST }
    }

    /// Waits before the next attempt, or returns the failure if there is none to be made.
    pub async fn pause(&mut self, failure: Failure) -> Result<(), Failure> {
        let asked = match &failure {
            Failure::Connection { .. } => None,
            Failure::Problem(problem) if problem.retryable => {
                problem.retry_after_ms.map(Duration::from_millis)
            }
            _ => return Err(failure),
        };
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            return Err(failure);
        }
        tokio::time::sleep(asked.unwrap_or(self.wait).min(BACKOFF_MAX)).await;
        self.wait = self.wait.saturating_mul(2).min(BACKOFF_MAX);
        Ok(())
    }
}

/// A path or name as a query's value.
pub fn quoted(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~/".contains(&b);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_survives_a_query() {
        assert_eq!(quoted("/a b/ü&c=%"), "/a%20b/%C3%BC%26c%3D%25");
    }

    #[test]
    fn without_a_daemon_the_failure_says_how_to_start_one_or_name_another() {
        let key = no_key(Path::new("/var/lib/bivouac/admin.key"), &io::ErrorKind::NotFound.into());
        let connection = Failure::Connection { server: "http://a".to_owned(), cause: "refused".to_owned() };
        for said in [key, connection.to_string()] {
            assert!(said.contains("`bivouacd`, as root") && said.contains("BIVOUAC_SERVER"), "{said}");
        }
        let denied = no_key(Path::new("/x"), &io::ErrorKind::PermissionDenied.into());
        assert!(denied.contains("as root") && !denied.contains("bivouacd"), "{denied}");
    }

    #[tokio::test]
    async fn only_what_may_be_tried_again_is() {
        let problem = |retryable| {
            Failure::Problem(Problem { retryable, retry_after_ms: Some(1), ..Problem::default() })
        };
        let mut backoff = Backoff::new(3);
        assert!(backoff.pause(problem(false)).await.is_err());
        assert!(backoff.pause(problem(true)).await.is_ok());
        assert!(backoff.pause(problem(true)).await.is_ok());
        assert!(backoff.pause(problem(true)).await.is_err());
    }
}
