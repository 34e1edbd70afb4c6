//! A command's output, as it comes and byte for byte, over connections that may break.

use crate::client::{Backoff, Client, Failure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt;
use reqwest::Method;
use serde_json::Value;
use std::io::{self, Write};

/// Attempts without a single event in between.
const ATTEMPTS: u32 = 20;

/// Writes a command's output to our own until it has ended; returns its document.
pub async fn follow(client: &Client, command: &str) -> Result<Value, Failure> {
    let path = format!("{command}/stream");
    let mut last = None::<String>;
    let mut backoff = Backoff::new(ATTEMPTS);
    loop {
        let mut request = client.request(Method::GET, &path);
        if let Some(last) = &last {
            request = request.header("last-event-id", last);
        }
        let failure = match client.once(request).await {
            Err(failure) => failure,
            Ok(response) => {
                let mut events = Events::default();
                let mut body = response.bytes_stream();
                loop {
                    match body.next().await {
                        Some(Ok(bytes)) => {
                            for event in events.take(&bytes) {
                                backoff = Backoff::new(ATTEMPTS);
                                last = event.id.clone().or(last);
                                if let Some(document) = heed(&event)? {
                                    return Ok(document);
                                }
                            }
                        }
                        Some(Err(e)) => break client.unreachable(&e),
                        None => {
                            break Failure::Connection {
                                server: "the daemon".to_owned(),
                                cause: "the stream broke off".to_owned(),
                            };
                        }
                    }
                }
            }
        };
        backoff.pause(failure).await?;
    }
}

/// Carries out one event. Some: the command has ended.
fn heed(event: &Event) -> Result<Option<Value>, Failure> {
    let data: Value = serde_json::from_str(&event.data).map_err(|e| Failure::Protocol(e.to_string()))?;
    match event.kind.as_str() {
        "output" => {
            let bytes = match (data["text"].as_str(), data["data"].as_str()) {
                (Some(text), _) => text.as_bytes().to_vec(),
                (None, Some(data)) => STANDARD.decode(data).map_err(|e| Failure::Protocol(e.to_string()))?,
                (None, None) => return Err(Failure::Protocol("an output without bytes".to_owned())),
            };
            write(data["stream"] == "stderr", &bytes)?;
            Ok(None)
        }
        "gap" => {
            eprintln!(
                "bivouac: bytes {} to {} of {} were dropped past the output limit",
                data["from"], data["to"], data["stream"]
            );
            Ok(None)
        }
        "end" => Ok(Some(data)),
        "error" => Err(Failure::Protocol(data["detail"].to_string())),
        _ => Ok(None),
    }
}

fn write(stderr: bool, bytes: &[u8]) -> io::Result<()> {
    if stderr {
        let mut out = io::stderr().lock();
        out.write_all(bytes)?;
        out.flush()
    } else {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Event {
    kind: String,
    id: Option<String>,
    data: String,
}

/// Server-sent events from bytes, however they are cut.
#[derive(Debug, Default)]
struct Events {
    /// The start of a line whose end has not come.
    buffer: Vec<u8>,
    event: Event,
}

impl Events {
    fn take(&mut self, bytes: &[u8]) -> Vec<Event> {
        let mut done = Vec::new();
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            self.buffer.extend_from_slice(piece);
            if !piece.ends_with(b"\n") {
                break;
            }
            let line = std::mem::take(&mut self.buffer);
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end_matches(['\n', '\r']);
            if line.is_empty() {
                let event = std::mem::take(&mut self.event);
                if !event.data.is_empty() {
                    done.push(event);
                }
                continue;
            }
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match name {
                "event" => value.clone_into(&mut self.event.kind),
                "id" => self.event.id = Some(value.to_owned()),
                "data" => self.event.data.push_str(value),
                // A comment keeps the connection alive.
                _ => {}
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_whole_however_the_bytes_are_cut() {
        let text = b": hello\n\nevent: output\nid: 3-0\ndata: {\"a\":1}\n\nevent: end\nid: 3-0\ndata: {}\n\n";
        for cut in 0..text.len() {
            let mut events = Events::default();
            let mut all = events.take(&text[..cut]);
            all.extend(events.take(&text[cut..]));
            assert_eq!(all.len(), 2, "cut at {cut}");
            assert_eq!(
                (all[0].kind.as_str(), all[0].id.as_deref(), all[0].data.as_str()),
                ("output", Some("3-0"), "{\"a\":1}")
            );
            assert_eq!(all[1].kind, "end");
        }
    }
}
