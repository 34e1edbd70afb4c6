//! Requests and replies, as any caller would make and read them.

use base64::{Engine, engine::general_purpose::STANDARD};
use reqwest::{
    Method,
    blocking::{Body, Response},
};
use serde_json::{Value, json};
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

#[derive(Clone)]
pub struct Client {
    http: reqwest::blocking::Client,
    url: String,
    key: String,
}

/// A status and a JSON body.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: u16,
    pub replayed: bool,
    pub body: Value,
}

impl Reply {
    /// The body, when the status is the one expected.
    #[track_caller]
    pub fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{:#}", self.body);
        self.body
    }

    #[track_caller]
    pub fn expect_success(self) -> Value {
        assert!((200..300).contains(&self.status), "{}: {:#}", self.status, self.body);
        self.body
    }

    /// A problem document with this status and code.
    #[track_caller]
    pub fn expect_problem(self, status: u16, code: &str) -> Value {
        let body = self.expect(status);
        assert_eq!(body["code"], code, "{body:#}");
        assert!(body["detail"].as_str().is_some_and(|d| !d.is_empty()), "{body:#}");
        assert!(body["retryable"].is_boolean(), "{body:#}");
        body
    }
}

impl Client {
    pub fn new(url: &str, key: &str) -> Self {
        let http = reqwest::blocking::Client::builder().timeout(Duration::from_secs(300)).build().unwrap();
        Self { http, url: url.to_owned(), key: key.to_owned() }
    }

    pub fn with_key(&self, key: &str) -> Self {
        Self { key: key.to_owned(), ..self.clone() }
    }

    pub fn request(&self, method: Method, path: &str) -> reqwest::blocking::RequestBuilder {
        self.http.request(method, format!("{}{path}", self.url)).bearer_auth(&self.key)
    }

    pub fn get(&self, path: &str) -> Reply {
        reply(self.request(Method::GET, path).send().unwrap())
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        reply(self.request(Method::POST, path).json(body).send().unwrap())
    }

    pub fn post_raw(&self, path: &str, body: &'static str) -> Reply {
        let request = self.request(Method::POST, path).header("content-type", "application/json").body(body);
        reply(request.send().unwrap())
    }

    pub fn delete(&self, path: &str) -> Reply {
        reply(self.request(Method::DELETE, path).send().unwrap())
    }

    pub fn upload(&self, sandbox: &str, query: &str, content: impl Into<Body>) -> Reply {
        let path = format!("/v1/sandboxes/{sandbox}/files?{query}");
        reply(self.request(Method::PUT, &path).body(content).send().unwrap())
    }

    pub fn download(&self, sandbox: &str, query: &str) -> Vec<u8> {
        let path = format!("/v1/sandboxes/{sandbox}/files?{query}");
        let response = self.request(Method::GET, &path).send().unwrap();
        assert_eq!(response.status(), 200, "{}", response.text().unwrap());
        response.bytes().unwrap().to_vec()
    }

    /// Creates a sandbox and expects it to be running.
    #[track_caller]
    pub fn create(&self, template: &str) -> String {
        let sandbox = self.post("/v1/sandboxes", &json!({ "template": template })).expect(201);
        assert_eq!(sandbox["state"], "running", "{sandbox:#}");
        sandbox["id"].as_str().unwrap().to_owned()
    }

    /// Deletes a sandbox and waits for its release.
    #[track_caller]
    pub fn remove(&self, sandbox: &str) -> Value {
        self.delete(&format!("/v1/sandboxes/{sandbox}?wait=1")).expect(200)
    }

    /// Ids of all sandboxes that are not deleted.
    pub fn sandboxes(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut query = String::new();
        loop {
            let Ok(response) = self.request(Method::GET, &format!("/v1/sandboxes{query}")).send() else {
                return found;
            };
            let page = reply(response).body;
            for sandbox in page["items"].as_array().into_iter().flatten() {
                if sandbox["state"] != "deleted" {
                    found.extend(sandbox["id"].as_str().map(str::to_owned));
                }
            }
            match page["next_cursor"].as_str() {
                Some(cursor) => query = format!("?cursor={cursor}"),
                None => return found,
            }
        }
    }

    /// Submits a command with a request id of its own and returns whatever comes.
    pub fn submit(&self, sandbox: &str, mut command: Value) -> Reply {
        if command.get("request_id").is_none() {
            command["request_id"] = json!(unique());
        }
        self.post(&format!("/v1/sandboxes/{sandbox}/commands"), &command)
    }

    /// Runs a shell command to its end.
    #[track_caller]
    pub fn shell(&self, sandbox: &str, script: &str) -> Value {
        self.submit(sandbox, json!({ "shell": script })).expect(200)
    }

    /// Runs a shell command that has to succeed, and gives its standard output.
    #[track_caller]
    pub fn output(&self, sandbox: &str, script: &str) -> String {
        let ended = self.shell(sandbox, script);
        assert_eq!(ended["exit_code"], 0, "{script}: {ended:#}");
        String::from_utf8(bytes(&ended["stdout"])).unwrap()
    }

    /// How many commands of a sandbox are running now.
    pub fn running_commands(&self, sandbox: &str) -> usize {
        let listed = self.get(&format!("/v1/sandboxes/{sandbox}/commands")).expect(200);
        let commands = listed["items"].as_array().into_iter().flatten();
        commands.filter(|command| command["status"] == "running").count()
    }

    pub fn command(&self, sandbox: &str, id: &str) -> Value {
        self.get(&format!("/v1/sandboxes/{sandbox}/commands/{id}")).expect(200)
    }
}

/// The bytes of a stream of a result, in whichever of its two forms it came.
#[track_caller]
pub fn bytes(stream: &Value) -> Vec<u8> {
    match (stream["text"].as_str(), stream["data"].as_str()) {
        (Some(text), None) => text.as_bytes().to_vec(),
        (None, Some(data)) => STANDARD.decode(data).unwrap(),
        _ => panic!("a stream has text or data: {stream:#}"),
    }
}

/// An id that no other request in this run has.
pub fn unique() -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

fn reply(response: Response) -> Reply {
    let status = response.status().as_u16();
    let replayed = response.headers().get("idempotent-replayed").is_some_and(|value| value == "true");
    let text = response.text().unwrap();
    let body = if text.is_empty() {
        Value::Null
    } else {
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("status {status}, not JSON ({e}): {text:?}"))
    };
    Reply { status, replayed, body }
}
