//! A daemon on a simulated host, and requests to it.

use crate::agent::Announcements;
use crate::auth;
use crate::daemon::Daemon;
use crate::machine::simulated::Simulated;
use crate::store::{NewKey, Store};
use crate::templates::Templates;
use crate::{api, reconcile, sandboxes};
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tower::ServiceExt;

pub struct Host {
    pub dir: tempfile::TempDir,
    pub world: Simulated,
    pub daemon: Arc<Daemon>,
    pub key: String,
    router: Router,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub bytes: Vec<u8>,
    pub json: Value,
}

impl Answer {
    pub fn code(&self) -> &str {
        self.json["code"].as_str().unwrap_or("")
    }
}

async fn daemon(dir: &Path, world: &Simulated, settle: impl FnOnce(&mut Daemon)) -> Arc<Daemon> {
    let template = dir.join("templates/base");
    std::fs::create_dir_all(&template).unwrap();
    std::fs::write(template.join("rootfs.erofs"), b"image").unwrap();
    std::fs::write(template.join("template.toml"), "memory_mib = 128\ndisk_mib = 1000\n[env]\nA = \"1\"\n")
        .unwrap();
    let store = Store::open(&dir.join("store.db")).await.unwrap();
    store.seed_cids(1).await.unwrap();
    let announcements: Announcements = world.announcements.clone();
    let templates = Templates::new(dir.join("templates"));
    let machines = Arc::new(world.clone());
    let mut daemon = Daemon::new(store, machines, announcements, templates, dir.to_owned(), 9);
    settle(&mut daemon);
    Arc::new(daemon)
}

impl Host {
    pub async fn new() -> Self {
        Self::with(|_| {}).await
    }

    /// A host whose daemon is more or less patient than others.
    pub async fn with(settle: impl FnOnce(&mut Daemon)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let world = Simulated::new(dir.path().to_owned());
        let daemon = daemon(dir.path(), &world, settle).await;
        let key = auth::first_key(&daemon.store, &dir.path().join("admin.key"), 0).await.unwrap().unwrap();
        tokio::spawn(sandboxes::sweep(Arc::clone(&daemon)));
        let router = api::router(Arc::clone(&daemon));
        Self { dir, world, daemon, key, router }
    }

    /// The daemon ends without a word, and another one starts on what it left.
    pub async fn restart(self) -> Self {
        let Self { dir, world, daemon: old, key, router } = self;
        drop(router);
        old.store.close().await;
        let world = world.for_another_daemon();
        let daemon = daemon(dir.path(), &world, |_| {}).await;
        reconcile::take_over(&daemon).await.unwrap();
        let router = api::router(Arc::clone(&daemon));
        Self { dir, world, daemon, key, router }
    }

    /// A key of another organization.
    pub async fn foreign_key(&self) -> String {
        let (id, secret) = ("00".repeat(8), "11".repeat(32));
        let secret_hash = Sha256::digest(secret.as_bytes()).to_vec();
        let key =
            NewKey { id: &id, org: "other", name: "x", secret_hash: &secret_hash, scopes: "admin", at: 0 };
        self.daemon.store.add_key(&key).await.unwrap();
        format!("biv_{id}_{secret}")
    }

    pub async fn raw(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes().to_vec();
        let json = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Answer { status: parts.status, headers: parts.headers, bytes, json }
    }

    pub async fn send(&self, key: &str, method: &str, path: &str, body: Option<Value>) -> Answer {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::AUTHORIZATION, format!("Bearer {key}"));
        let request = match body {
            None => request.body(Body::empty()),
            Some(body) => {
                request.header(header::CONTENT_TYPE, "application/json").body(Body::from(body.to_string()))
            }
        };
        self.raw(request.unwrap()).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(&self.key, "GET", path, None).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(&self.key, "POST", path, Some(body)).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send(&self.key, "DELETE", path, None).await
    }

    pub async fn put(&self, path: &str, bytes: Vec<u8>) -> Answer {
        let request = Request::builder().method("PUT").uri(path);
        let request = request.header(header::AUTHORIZATION, format!("Bearer {}", self.key));
        self.raw(request.body(Body::from(bytes)).unwrap()).await
    }

    /// A sandbox that runs.
    pub async fn sandbox(&self) -> String {
        let made = self.post("/v1/sandboxes", json!({"template": "base"})).await;
        assert_eq!(made.status, 201, "{}", made.json);
        made.json["id"].as_str().unwrap().to_owned()
    }

    pub async fn run(&self, sandbox: &str, body: Value) -> Answer {
        self.post(&format!("/v1/sandboxes/{sandbox}/commands"), body).await
    }

    /// Waits until the sandbox is as wanted; fails loudly if it does not come to that.
    pub async fn until(&self, sandbox: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        for _ in 0..400 {
            let now = self.get(&format!("/v1/sandboxes/{sandbox}")).await.json;
            if wanted(&now) {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{sandbox} never came to be as wanted");
    }
}
