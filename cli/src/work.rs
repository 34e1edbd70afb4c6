//! `bivouac run` and `bivouac exec`: a command's life, seen from outside.

use crate::OWN_FAILURE;
use crate::args::{Exec, Format, How, Run};
use crate::client::{Client, Failure, request_id};
use crate::follow::follow;
use crate::sandboxes::{address, creation, object};
use crate::show::{self, plain};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Standard input that the API takes with a command, in bytes.
const STDIN_MAX: u64 = 1 << 20;
/// Kept output of each stream, in bytes: how far a terminal, or `-o json`, may be behind the command and lose nothing.
const OUTPUT_LIMIT: u64 = 16 << 20;
/// Life of a sandbox for one command, should its deletion not be asked for (this program was killed, say).
const LIFE: Duration = Duration::from_secs(24 * 3600);
/// The same, on top of the command's timeout.
const LIFE_AFTER_TIMEOUT: Duration = Duration::from_secs(600);
/// How long the deletion is tried for when the daemon could not be reached.
const LAST_TRY: Duration = Duration::from_millis(500);
/// One long poll.
const POLL_MS: u64 = 30_000;

/// Signals that end a program.
struct Interrupts(Vec<(i32, Signal)>);

impl Interrupts {
    fn listen() -> Result<Self, Failure> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let listen = |kind: SignalKind| Ok::<_, std::io::Error>((kind.as_raw_value(), signal(kind)?));
        kinds.into_iter().map(listen).collect::<Result<_, _>>().map(Self).map_err(Failure::Output)
    }

    /// The number of the next one.
    async fn next(&mut self) -> i32 {
        let (number, _, _) = futures_util::future::select_all(self.0.iter_mut().map(|(number, signal)| {
            Box::pin(async move {
                signal.recv().await;
                *number
            })
        }))
        .await;
        number
    }
}

fn signaled(number: i32) -> u8 {
    u8::try_from(number).map_or(OWN_FAILURE, |number| 128_u8.saturating_add(number))
}

/// The body of a command.
async fn submission(how: &How, request_id: &str) -> Result<Value, Failure> {
    let mut body = Map::new();
    body.insert("request_id".to_owned(), json!(request_id));
    body.insert("argv".to_owned(), json!(how.command));
    body.insert("env".to_owned(), object(&how.env));
    body.insert("output_limit_bytes".to_owned(), json!(OUTPUT_LIMIT));
    let timeout_ms = how.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
    let optional = [("cwd", json!(how.cwd)), ("user", json!(how.user)), ("timeout_ms", json!(timeout_ms))];
    body.extend(
        optional.into_iter().filter(|(_, value)| !value.is_null()).map(|(name, v)| (name.to_owned(), v)),
    );
    if how.stdin {
        let mut bytes = Vec::new();
        tokio::io::stdin().take(STDIN_MAX.saturating_add(1)).read_to_end(&mut bytes).await?;
        if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > STDIN_MAX {
            let advice =
                "standard input is above 1 MiB: copy it in with `bivouac cp - ID:FILE` and read it there";
            return Err(Failure::Local(advice.to_owned()));
        }
        body.insert("stdin".to_owned(), json!({ "encoding": "base64", "data": STANDARD.encode(bytes) }));
    }
    Ok(Value::Object(body))
}

/// Submits a command; its address.
async fn submit(client: &Client, sandbox: &str, body: &Value) -> Result<String, Failure> {
    let path = format!("{}/commands?wait_ms=0", address(sandbox));
    let submitted = client.post(&path, body).await?;
    Ok(format!("{}/commands/{}", address(sandbox), plain(&submitted["id"])))
}

/// Shows a command's output as it comes, or its document at the end; the document.
async fn attend(client: &Client, command: &str, format: Format) -> Result<Value, Failure> {
    if format == Format::Table {
        return follow(client, command).await;
    }
    loop {
        let now = client.get(&format!("{command}?wait_ms={POLL_MS}")).await?;
        if !matches!(now["status"].as_str(), Some("accepted" | "running")) {
            show::json(&now)?;
            return Ok(now);
        }
    }
}

/// What a command's end is as an exit code of ours, and the line that explains it.
fn exit_code(command: &Value) -> (u8, Option<String>) {
    let detail = || plain(&command["detail"]);
    let number = |name: &str| command[name].as_i64();
    let own = |code: u8, line: String| (code, Some(line));
    match command["status"].as_str() {
        Some("exited") => match number("exit_code").and_then(|code| u8::try_from(code).ok()) {
            Some(code) => (code, command["limits_hit"].is_array().then(detail)),
            None => own(OWN_FAILURE, "the command has no exit code".to_owned()),
        },
        Some("signaled") => {
            let code = number("signal").and_then(|n| i32::try_from(n).ok()).map_or(OWN_FAILURE, signaled);
            let line =
                command["termination_reason"].as_str().map(|reason| format!("{} ({reason})", detail()));
            (code, line)
        }
        Some("timed_out") => own(124, detail()),
        Some("start_failed") => {
            let code = if command["termination_reason"] == "not_found" { 127 } else { 126 };
            own(code, format!("{} ({})", detail(), plain(&command["termination_reason"])))
        }
        Some(status) => own(OWN_FAILURE, format!("the command was {status}: {}", detail())),
        None => own(OWN_FAILURE, "the command has no status".to_owned()),
    }
}

fn conclude(command: &Value) -> u8 {
    let (code, line) = exit_code(command);
    if let Some(line) = line {
        eprintln!("bivouac: {line}");
    }
    code
}

pub async fn exec(client: &Client, args: Exec, format: Format) -> Result<u8, Failure> {
    let id = args.request_id.unwrap_or_else(request_id);
    let mut interrupts = Interrupts::listen()?;
    let mut body = submission(&args.how, &id).await?;
    if args.detach {
        body["background"] = json!(true);
        let path = format!("{}/commands", address(&args.sandbox));
        let started = client.post(&path, &body).await?;
        match format {
            Format::Json => show::json(&started)?,
            Format::Table => show::line(&plain(&started["id"]))?,
        }
        return Ok(match started["status"].as_str() {
            Some("start_failed" | "lost") => conclude(&started),
            _ => 0,
        });
    }
    let command = submit(client, &args.sandbox, &body).await?;
    tokio::select! {
        ended = attend(client, &command, format) => Ok(conclude(&ended?)),
        number = interrupts.next() => {
            if number == SignalKind::interrupt().as_raw_value() {
                client.post(&format!("{command}/cancel"), &Value::Null).await?;
                eprintln!("bivouac: canceled");
            } else {
                eprintln!("bivouac: left running; `bivouac commands {}` lists it", args.sandbox);
            }
            Ok(signaled(number))
        }
    }
}

pub async fn run(client: &Client, args: Run, format: Format) -> Result<u8, Failure> {
    let mut interrupts = Interrupts::listen()?;
    let submitted = submission(&args.how, &request_id()).await?;
    let mut shape = args.shape.clone();
    if !args.keep {
        let life = args.how.timeout.map_or(LIFE, |timeout| timeout.saturating_add(LIFE_AFTER_TIMEOUT));
        shape.ttl = Some(shape.ttl.unwrap_or(life));
    }
    let body = creation(&args.template, &shape, &[], &request_id());
    let done = tokio::select! {
        done = create_and_attend(client, &body, &submitted, format) => done,
        number = interrupts.next() => Ok(signaled(number)),
    };
    if args.keep {
        name_kept(client, &body).await;
        return done;
    }
    if matches!(done, Err(Failure::Connection { .. })) {
        // It may have been made all the same; if the daemon is away, its time to live ends it.
        let _ = tokio::time::timeout(LAST_TRY, remove(client, &body)).await;
        return done;
    }
    tokio::select! {
        removed = remove(client, &body) => match (done, removed) {
            (Ok(_), Err(failure)) => Err(failure),
            (done, _) => done,
        },
        // Asked to end twice: then its time to live ends the sandbox.
        number = interrupts.next() => {
            eprintln!("bivouac: not waiting for the sandbox to be deleted");
            Ok(signaled(number))
        }
    }
}

async fn create_and_attend(
    client: &Client,
    body: &Value,
    command: &Value,
    format: Format,
) -> Result<u8, Failure> {
    let made = client.post("/v1/sandboxes", body).await?;
    let command = submit(client, &plain(&made["id"]), command).await?;
    Ok(conclude(&attend(client, &command, format).await?))
}

/// The sandbox that our creation stands for. Asking again by the same request id finds it, whatever became of the answer.
async fn sandbox(client: &Client, body: &Value) -> Result<String, Failure> {
    Ok(plain(&client.post("/v1/sandboxes?wait=0", body).await?["id"]))
}

async fn remove(client: &Client, body: &Value) -> Result<(), Failure> {
    let id = match sandbox(client, body).await {
        Ok(id) => id,
        // It was refused, so there is none.
        Err(Failure::Problem(problem)) if !problem.retryable => return Ok(()),
        Err(failure) => return Err(failure),
    };
    client.delete(&format!("{}?wait=1", address(&id))).await?;
    Ok(())
}

async fn name_kept(client: &Client, body: &Value) {
    match sandbox(client, body).await {
        Ok(id) => eprintln!("bivouac: kept {id}"),
        Err(failure) => eprintln!("bivouac: {failure}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_has_its_exit_code() {
        let code = |command: Value| exit_code(&command).0;
        assert_eq!(code(json!({"status": "exited", "exit_code": 7})), 7);
        let bomb =
            json!({"status": "exited", "exit_code": 2, "limits_hit": ["pids"], "detail": "no process"});
        assert_eq!(exit_code(&bomb), (2, Some("no process".to_owned())), "what ran out is said");
        assert_eq!(code(json!({"status": "signaled", "signal": 9})), 137);
        assert_eq!(code(json!({"status": "timed_out"})), 124);
        assert_eq!(code(json!({"status": "start_failed", "termination_reason": "not_found"})), 127);
        assert_eq!(code(json!({"status": "start_failed", "termination_reason": "not_executable"})), 126);
        assert_eq!(code(json!({"status": "lost"})), 125);
        assert_eq!(code(json!({})), 125);
    }
}
