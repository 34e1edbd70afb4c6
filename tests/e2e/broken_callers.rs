//! Callers whose connections break, and callers that die.

use bivouac_tests::{Client, client::unique, shared};
use reqwest::Method;
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader},
    process::Stdio,
};

/// One event of a stream: its name, its id, its data.
type Event = (String, String, Value);

/// Opens a stream, takes one event of it, and breaks the connection.
fn one_event(client: &Client, path: &str, last: Option<&str>) -> Event {
    let mut request = client.request(Method::GET, path);
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    let response = request.send().unwrap();
    assert_eq!(response.status(), 200);
    let mut event: Event = Default::default();
    for line in BufReader::new(response).lines() {
        let line = line.unwrap();
        match line.split_once(':').map(|(field, value)| (field, value.trim_start())) {
            Some(("event", value)) => event.0 = value.to_owned(),
            Some(("id", value)) => event.1 = value.to_owned(),
            Some(("data", value)) => event.2 = serde_json::from_str(value).unwrap(),
            // The line between two events; a lone comment keeps the connection alive.
            _ if line.is_empty() && !event.0.is_empty() => return event,
            _ => {}
        }
    }
    panic!("the stream ended without an event");
}

/// C12, A20: a stream that breaks after every event, during and after the run, loses and repeats nothing.
#[test]
fn a_broken_stream_is_read_on_from_the_last_event_without_loss() {
    let client = shared().client();
    let sandbox = client.create("base");
    let request = json!({ "shell": "seq 1 30000; sleep 1; seq 30001 60000", "background": true });
    let command = client.submit(&sandbox, request).expect_success();
    let path = format!("/v1/sandboxes/{sandbox}/commands/{}", command["id"].as_str().unwrap());
    let (mut text, mut last, mut breaks) = (String::new(), None::<String>, 0);
    let end = loop {
        let (kind, id, data) = one_event(&client, &format!("{path}/stream"), last.as_deref());
        match kind.as_str() {
            "output" => {
                assert_eq!(data["offset"], text.len(), "event {id}");
                text.push_str(data["text"].as_str().unwrap());
                (last, breaks) = (Some(id), breaks + 1);
            }
            "end" => break data,
            other => panic!("{other}: {data:#}"),
        }
    };
    assert_eq!((&end["status"], &end["exit_code"]), (&json!("exited"), &json!(0)), "{end:#}");
    let expected: String = (1..=60_000).map(|n| format!("{n}\n")).collect();
    assert!(text == expected, "{} of {} bytes", text.len(), expected.len());
    assert!(breaks > 3, "it broke {breaks} times");

    // And from any offset, as raw bytes.
    let raw = client.request(Method::GET, &format!("{path}/output?offset=123456")).send().unwrap();
    assert!(raw.bytes().unwrap() == expected.as_bytes()[123_456..]);
    client.remove(&sandbox);
}

/// C18, X2: the command goes on when its caller is killed, and the same request gets its result.
#[test]
fn a_command_outlives_a_client_that_is_killed() {
    let host = shared();
    let client = host.client();
    let sandbox = client.create("base");
    let request = unique();
    let script = "echo run >> count; echo begun; while [ ! -e go ]; do sleep 0.1; done; echo done; exit 3";
    let exec = || {
        let mut command = host.cli();
        command.args(["exec", &sandbox, "--request-id", &request, "--", "sh", "-c", script]);
        command
    };
    let mut first = exec().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    host.eventually("the command runs", || client.running_commands(&sandbox) == 1);
    first.kill().unwrap();
    first.wait().unwrap();
    // Not before its client is gone does the command get to its end.
    client.upload(&sandbox, "path=go", "").expect_success();
    let second = exec().output().unwrap();
    assert_eq!(second.status.code(), Some(3), "{}", String::from_utf8_lossy(&second.stderr));
    assert_eq!(second.stdout, b"begun\ndone\n");
    assert_eq!(client.output(&sandbox, "wc -l < count"), "1\n", "it ran once");
    client.remove(&sandbox);
}

/// F3: an upload whose caller is killed half way leaves the old file.
#[test]
fn an_upload_whose_caller_is_killed_leaves_the_old_file() {
    let host = shared();
    let client = host.client();
    let sandbox = client.create("base");
    client.upload(&sandbox, "path=kept", "old").expect_success();
    let target = format!("{sandbox}:kept");
    let mut copying = host.cli().args(["cp", "-", &target]).stdin(Stdio::piped()).spawn().unwrap();
    // Its standard input stays open: the upload has begun, and cannot end.
    let mut input = copying.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, &vec![b'n'; 1 << 20]).unwrap();
    let begun = "ls -a | grep -c bivouac-upload || true";
    host.eventually("the upload begins", || client.output(&sandbox, begun) == "1\n");
    copying.kill().unwrap();
    copying.wait().unwrap();
    host.eventually("what was begun is gone", || client.output(&sandbox, begun) == "0\n");
    assert_eq!(client.download(&sandbox, "path=kept"), b"old");
    client.remove(&sandbox);
}
