//! The main job, played in a terminal: each step with its time and its JSON, checked against what was promised.
//! `cargo xtask demo` sets everything up and starts this where guests can run.

use bivouac_tests::{Client, Host, Reply, client::bytes};
use serde_json::{Value, json};
use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

/// What an agent wrote and nobody reviewed.
const PROGRAM: &str = r#"import json, os, platform, sys
numbers = [n for n in range(2, 60) if all(n % d for d in range(2, n))]
json.dump({"primes": numbers, "kernel": platform.release()}, open("result.json", "w"))
print("primes:", *numbers)
print("uid", os.getuid(), "on", os.uname().nodename, file=sys.stderr)
sys.exit(3)
"#;

fn main() -> ExitCode {
    println!("{}", bold("Bivouac: code that nobody reviewed, in a machine of its own."));
    let started = Instant::now();
    let host = Host::start();
    let play = Play { client: host.client(), width: terminal_width() };
    println!("{}", dim(&format!("bivouacd serves at {} after {}", host.url, time(started.elapsed()))));
    match play.all() {
        Ok(()) => {
            println!("\n{} in {}.", bold("Every step was as promised"), time(started.elapsed()));
            ExitCode::SUCCESS
        }
        Err(broken) => {
            eprintln!(
                "\n{}\n{broken}\n--- the daemon's log ---\n{}",
                bold("A promise was not kept."),
                host.log()
            );
            ExitCode::FAILURE
        }
    }
}

struct Play {
    client: Client,
    width: usize,
}

type Check = Result<(), String>;

impl Play {
    fn all(&self) -> Check {
        let templates = self.step("authenticate, and see what there is", "GET /v1/templates", || {
            self.client.get("/v1/templates")
        })?;
        promise(templates.status == 200, "the key opens the API", &templates)?;

        let created =
            self.step("create a sandbox from the template `python`", "POST /v1/sandboxes", || {
                self.client.post("/v1/sandboxes", &json!({ "template": "python", "name": "demo" }))
            })?;
        promise(
            created.status == 201 && created.body["state"] == "running",
            "the answer says running",
            &created,
        )?;
        let id = created.body["id"].as_str().unwrap_or_default().to_owned();
        let result = self.in_sandbox(&id);
        // Whatever happened in between, the machine goes.
        let ended = self.end(&id);
        result.and(ended)
    }

    fn in_sandbox(&self, id: &str) -> Check {
        let commands = format!("/v1/sandboxes/{id}/commands");
        let run = |request: &Value| self.client.post(&commands, request);

        let uploaded = self.step(
            "upload a Python program that nobody reviewed",
            "PUT …/files?path=program.py",
            || self.client.upload(id, "path=program.py", PROGRAM),
        )?;
        promise(uploaded.status < 300, "the file is there", &uploaded)?;

        let request = json!({ "request_id": "demo-run", "argv": ["python3", "program.py"] });
        let ran = self.step("run it: stdout, stderr and exit code", "POST …/commands", || run(&request))?;
        promise(ran.body["exit_code"] == 3, "the exit code is the program's", &ran)?;
        promise(
            ran.body["stdout"]["text"].as_str().is_some_and(|t| t.starts_with("primes: 2 3")),
            "stdout",
            &ran,
        )?;
        promise(
            ran.body["stderr"]["text"].as_str().is_some_and(|t| t.starts_with("uid 1000")),
            "stderr",
            &ran,
        )?;

        let request = json!({ "request_id": "demo-timeout", "timeout_ms": 1000,
                              "shell": "echo as far as it got; sleep 60 & sleep 60" });
        let late =
            self.step("run a command that reaches its timeout", "POST …/commands", || run(&request))?;
        promise(late.body["status"] == "timed_out", "it is ended at its timeout", &late)?;
        promise(late.body["stdout"]["text"] == "as far as it got\n", "its output is kept", &late)?;
        let state = self.step("the sandbox is still running", "GET /v1/sandboxes/{id}", || {
            self.client.get(&format!("/v1/sandboxes/{id}"))
        })?;
        promise(state.body["state"] == "running", "a timeout leaves the machine", &state)?;

        let request = json!({ "request_id": "demo-once", "shell": "echo run >> runs; wc -l < runs" });
        let first = self.step("submit a request_id", "POST …/commands", || run(&request))?;
        let second = self.step("submit the same request_id again", "POST …/commands", || run(&request))?;
        promise(
            second.replayed && second.body == first.body,
            "the retry gets the first one's result",
            &second,
        )?;
        promise(second.body["stdout"]["text"] == "1\n", "it ran once", &second)?;

        let started = Instant::now();
        let content = self.client.download(id, "path=result.json");
        self.show(
            "download what it made",
            "GET …/files?path=result.json",
            started.elapsed(),
            &json!(String::from_utf8_lossy(&content)),
        );
        let made: Value = serde_json::from_slice(&content).map_err(|e| format!("result.json: {e}"))?;
        promise_that(made["primes"][0] == 2, "the file is the program's")
    }

    fn end(&self, id: &str) -> Check {
        let deleted =
            self.step("delete, and wait for the release", "DELETE /v1/sandboxes/{id}?wait=1", || {
                self.client.delete(&format!("/v1/sandboxes/{id}?wait=1"))
            })?;
        promise(deleted.status == 200, "everything it held is released", &deleted)?;
        let usage = self.step(
            "read the final usage with its two timestamps",
            "GET /v1/usage?sandbox_id=…",
            || self.client.get(&format!("/v1/usage?sandbox_id={id}")),
        )?;
        let line = &usage.body["items"][0];
        promise(line["state"] == "final", "the usage is final", &usage)?;
        promise(
            line["billing_ended_at"] == line["delete_accepted_at"],
            "billing ends when the delete is accepted",
            &usage,
        )?;
        promise(line["released_at"].is_string(), "and the release has its own time", &usage)
    }

    fn step(&self, what: &str, call: &str, act: impl FnOnce() -> Reply) -> Result<Reply, String> {
        let started = Instant::now();
        let reply = act();
        self.show(what, &format!("{call} → {}", reply.status), started.elapsed(), &reply.body);
        Ok(reply)
    }

    fn show(&self, what: &str, call: &str, took: Duration, body: &Value) {
        println!("\n{} {}", bold(what), dim(&format!("· {call} · {}", time(took))));
        let body = if body.is_string() { body.as_str().unwrap_or_default().to_owned() } else { pretty(body) };
        for line in body.lines() {
            let short: String = line.chars().take(self.width.saturating_sub(4)).collect();
            println!("    {short}");
        }
    }
}

fn promise(kept: bool, what: &str, reply: &Reply) -> Check {
    if kept { Ok(()) } else { Err(format!("{what}: status {}\n{:#}", reply.status, reply.body)) }
}

fn promise_that(kept: bool, what: &str) -> Check {
    if kept { Ok(()) } else { Err(what.to_owned()) }
}

fn pretty(body: &Value) -> String {
    // Streams that are empty say nothing; the rest is what the API sent.
    let mut body = body.clone();
    if let Some(fields) = body.as_object_mut() {
        fields.retain(|key, value| !(matches!(key.as_str(), "stdout" | "stderr") && bytes(value).is_empty()));
    }
    format!("{body:#}")
}

fn time(took: Duration) -> String {
    if took < Duration::from_secs(2) {
        format!("{} ms", took.as_millis())
    } else {
        format!("{:.1} s", took.as_secs_f64())
    }
}

fn terminal_width() -> usize {
    std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).unwrap_or(120)
}

fn bold(text: &str) -> String {
    styled("1", text)
}

fn dim(text: &str) -> String {
    styled("2", text)
}

/// Set by `cargo xtask demo` where its own output is a terminal.
fn styled(code: &str, text: &str) -> String {
    if std::env::var_os("BIVOUAC_COLOR").is_some() {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}
