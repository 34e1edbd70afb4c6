//! Results an unattended caller can rely on.

use bivouac_tests::{
    client::{bytes, unique},
    shared,
};
use serde_json::{Value, json};
use std::thread;

/// A5: both streams and the exit code, separate and exact.
#[test]
fn a_command_returns_both_streams_and_its_exit_code() {
    let client = shared().client();
    let sandbox = client.create("base");
    let ended = client.shell(&sandbox, "echo out; echo err >&2; exit 7");
    assert_eq!((&ended["status"], &ended["exit_code"]), (&json!("exited"), &json!(7)));
    assert_eq!((&ended["stdout"]["text"], &ended["stderr"]["text"]), (&json!("out\n"), &json!("err\n")));
    assert_eq!((&ended["stdout"]["bytes_total"], &ended["stdout"]["truncated"]), (&json!(4), &json!(false)));
    let ended = client.shell(&sandbox, "kill -9 $$");
    assert_eq!((&ended["status"], &ended["signal"]), (&json!("signaled"), &json!(9)), "{ended:#}");
    assert!(ended.get("exit_code").is_none(), "{ended:#}");
    client.remove(&sandbox);
}

/// argv, cwd, env, user and standard input are what the request says; the environment holds nothing of the agent's.
#[test]
fn a_command_gets_what_the_request_says() {
    let client = shared().client();
    let sandbox = client.create("base");
    let ended = client
        .submit(
            &sandbox,
            json!({ "argv": ["sh", "-c", "pwd; id -un; echo $A; cat"], "cwd": "/tmp", "user": "root",
                    "env": { "A": "a b" }, "stdin": "from stdin" }),
        )
        .expect(200);
    assert_eq!(ended["stdout"]["text"], "/tmp\nroot\na b\nfrom stdin", "{ended:#}");
    assert_eq!(client.output(&sandbox, "id -un; pwd"), "user\n/home/user\n");
    let env = client.submit(&sandbox, json!({ "argv": ["env"] })).expect(200);
    let text = env["stdout"]["text"].as_str().unwrap();
    let mut names: Vec<&str> = text.lines().filter_map(|line| line.split('=').next()).collect();
    names.sort_unstable();
    // LANG and PATH are the template's; the rest is the account's.
    assert_eq!(names, ["HOME", "LANG", "LOGNAME", "PATH", "USER"], "{text}");
    client.remove(&sandbox);
}

/// C5, C19: a program that reads its input to the end ends.
#[test]
fn standard_input_ends() {
    let client = shared().client();
    let sandbox = client.create("base");
    let ended = client.submit(&sandbox, json!({ "argv": ["cat"], "timeout_ms": 60_000 })).expect(200);
    assert_eq!((&ended["status"], &ended["exit_code"]), (&json!("exited"), &json!(0)), "{ended:#}");
    // Input that nobody reads holds nothing up either.
    let request = json!({ "argv": ["true"], "stdin": "x".repeat(1 << 20) });
    assert_eq!(client.submit(&sandbox, request).expect(200)["exit_code"], 0);
    client.remove(&sandbox);
}

/// C7: bytes that are no text arrive as they are.
#[test]
fn binary_output_is_exact() {
    let client = shared().client();
    let sandbox = client.create("python");
    let script = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 300)";
    let ended = client.submit(&sandbox, json!({ "argv": ["python3", "-c", script] })).expect(200);
    assert_eq!(ended["stdout"]["encoding"], "base64");
    let expected: Vec<u8> = (0..=255).collect::<Vec<u8>>().repeat(300);
    assert_eq!(bytes(&ended["stdout"]), expected);
    client.remove(&sandbox);
}

/// C13: a command that could not start says why, and is no exit code.
#[test]
fn a_command_that_cannot_start_says_why() {
    let client = shared().client();
    let sandbox = client.create("base");
    client.output(&sandbox, "echo '#!/no/such/interpreter' > bad; chmod +x bad; echo plain > plain");
    client.output(&sandbox, "mkdir locked; chmod 0 locked");
    for (request, reason) in [
        (json!({ "argv": ["no-such-program"] }), "not_found"),
        (json!({ "argv": ["./plain"] }), "not_executable"),
        (json!({ "argv": ["./bad"] }), "bad_interpreter"),
        (json!({ "argv": ["true"], "cwd": "/no/such/folder" }), "no_such_directory"),
        (json!({ "argv": ["true"], "cwd": "/home/user/plain" }), "no_such_directory"),
        (json!({ "argv": ["true"], "cwd": "/home/user/locked" }), "directory_forbidden"),
        (json!({ "argv": ["true"], "user": "nobody-here" }), "no_such_user"),
    ] {
        let ended = client.submit(&sandbox, request.clone()).expect(200);
        assert_eq!(
            (&ended["status"], &ended["termination_reason"]),
            (&json!("start_failed"), &json!(reason)),
            "{request}: {ended:#}"
        );
        assert!(ended.get("exit_code").is_none() && ended["detail"].is_string(), "{ended:#}");
    }
    client.remove(&sandbox);
}

/// A13, C2, C3, C16: the timeout ends everything the command started, keeps what it wrote, and leaves the sandbox.
#[test]
fn a_timeout_ends_the_whole_command_and_keeps_its_output() {
    let client = shared().client();
    let sandbox = client.create("base");
    let script = "echo before; (trap '' TERM; sleep 1000) & setsid sleep 1001 & sleep 1002";
    let ended = client.submit(&sandbox, json!({ "shell": script, "timeout_ms": 1500 })).expect(200);
    assert_eq!(
        (&ended["status"], &ended["termination_reason"]),
        (&json!("timed_out"), &json!("timeout")),
        "{ended:#}"
    );
    assert_eq!(ended["stdout"]["text"], "before\n");
    assert!(ended.get("exit_code").is_none());
    assert_eq!(client.get(&format!("/v1/sandboxes/{sandbox}")).expect(200)["state"], "running");
    assert_eq!(client.output(&sandbox, "ps -o args | grep -c '[s]leep 100' || true"), "0\n");
    client.remove(&sandbox);
}

/// C4: the command ends with its leader; what it left in the background lives on.
#[test]
fn a_background_child_does_not_hold_the_command_open() {
    let client = shared().client();
    let sandbox = client.create("base");
    let request = json!({ "shell": "sleep 1000 & echo started", "timeout_ms": 120_000 });
    let ended = client.submit(&sandbox, request).expect(200);
    assert_eq!(
        (&ended["status"], &ended["stdout"]["text"]),
        (&json!("exited"), &json!("started\n")),
        "{ended:#}"
    );
    assert_eq!(client.output(&sandbox, "ps -o args | grep -c '[s]leep 1000'"), "1\n");
    client.remove(&sandbox);
}

/// A12, C1: ten submissions of one request, at once, run once, and all see the same result.
#[test]
fn concurrent_submissions_of_one_request_run_once() {
    let client = shared().client();
    let sandbox = client.create("base");
    let request = json!({ "request_id": unique(), "shell": "echo run >> count; sleep 1; wc -l < count" });
    let attempts: Vec<_> = (0..10)
        .map(|_| {
            let (client, sandbox, request) = (client.clone(), sandbox.clone(), request.clone());
            thread::spawn(move || client.submit(&sandbox, request))
        })
        .collect();
    let replies: Vec<_> = attempts.into_iter().map(|attempt| attempt.join().unwrap()).collect();
    for reply in &replies {
        assert_eq!((reply.status, &reply.body["stdout"]["text"]), (200, &json!("1\n")), "{reply:?}");
        assert_eq!(reply.body["id"], replies[0].body["id"]);
    }
    assert_eq!(replies.iter().filter(|reply| !reply.replayed).count(), 1, "one was the first");
    let later = client.submit(&sandbox, request.clone());
    assert!(later.replayed);
    assert_eq!(later.expect(200), replies[0].body);
    let mut other = request;
    other["shell"] = json!("echo another");
    client.submit(&sandbox, other).expect_problem(422, "request_id_reused");
    assert_eq!(client.output(&sandbox, "wc -l < count"), "1\n");
    client.remove(&sandbox);
}

/// C6, C8: a hundred megabytes go through in constant memory; what is not kept is counted, and head and tail are there.
#[test]
fn output_past_the_limit_is_counted_and_its_ends_kept() {
    let client = shared().client();
    let sandbox = client.create("base");
    let script = "echo first; head -c 100000000 /dev/zero; echo; echo last";
    let ended = client.submit(&sandbox, json!({ "shell": script, "output_limit_bytes": 65536 })).expect(200);
    let stdout = &ended["stdout"];
    assert_eq!(stdout["bytes_total"], 6 + 100_000_000 + 1 + 5, "{}", short(stdout));
    assert_eq!(stdout["truncated"], true);
    let kept = bytes(stdout);
    assert!(kept.starts_with(b"first\n\0\0") && kept.ends_with(b"\0\nlast\n"), "{}", short(stdout));
    assert!(kept.len() <= 65536 && kept.len() > 60000, "{} bytes kept", kept.len());
    assert_eq!(client.output(&sandbox, "echo still here"), "still here\n");
    client.remove(&sandbox);
}

/// C15: both streams at once, every byte.
#[test]
fn both_streams_at_once_lose_nothing() {
    let client = shared().client();
    let sandbox = client.create("base");
    let script = "head -c 5000000 /dev/zero | tr '\\0' o & head -c 5000000 /dev/zero | tr '\\0' e >&2; wait";
    let request = json!({ "shell": script, "output_limit_bytes": 8 << 20 });
    let ended = client.submit(&sandbox, request).expect(200);
    for (stream, byte) in [("stdout", b'o'), ("stderr", b'e')] {
        assert_eq!(
            (&ended[stream]["bytes_total"], &ended[stream]["truncated"]),
            (&json!(5_000_000), &json!(false))
        );
        let path = format!(
            "/v1/sandboxes/{sandbox}/commands/{}/output?stream={stream}&offset=0",
            ended["id"].as_str().unwrap()
        );
        let whole = client.request(reqwest::Method::GET, &path).send().unwrap().bytes().unwrap();
        assert!(
            whole.len() == 5_000_000 && whole.iter().all(|b| *b == byte),
            "{stream}: {} bytes",
            whole.len()
        );
    }
    client.remove(&sandbox);
}

/// A15, C14: one stuck command holds up neither others nor deletion.
#[test]
fn a_stuck_command_holds_up_nothing() {
    let client = shared().client();
    let sandbox = client.create("base");
    let stuck = client.submit(&sandbox, json!({ "argv": ["sleep", "1000"], "background": true }));
    assert!(matches!(stuck.status, 200..=202), "{stuck:?}");
    assert_eq!(client.output(&sandbox, "echo free"), "free\n");
    client.remove(&sandbox);
    let id = stuck.body["id"].as_str().unwrap();
    assert_eq!(client.command(&sandbox, id)["status"], "lost");
}

/// A command can be ended by its caller, with what it wrote so far.
#[test]
fn a_command_can_be_canceled_and_signaled() {
    let client = shared().client();
    let host = shared();
    let sandbox = client.create("base");
    let start = |script: &str| {
        let reply = client.submit(&sandbox, json!({ "shell": script, "background": true }));
        assert!(matches!(reply.status, 200..=202), "{reply:?}");
        let id = reply.body["id"].as_str().unwrap().to_owned();
        let path = format!("/v1/sandboxes/{sandbox}/commands/{id}");
        host.eventually("its output arrives", || client.get(&path).body["stdout"]["text"] == "up\n");
        path
    };
    let ended = |path: &str| {
        host.eventually("it ends", || client.get(path).body["ended_at"].is_string());
        client.get(path).expect(200)
    };
    let canceled = start("echo up; sleep 1000");
    assert!(client.post(&format!("{canceled}/cancel"), &json!({})).status < 300);
    assert_eq!(ended(&canceled)["status"], "canceled");
    let signaled = start("trap 'echo got; exit 5' USR1; echo up; while :; do sleep 0.1; done");
    assert!(client.post(&format!("{signaled}/signal"), &json!({ "signal": 10 })).status < 300);
    assert_eq!(ended(&signaled)["exit_code"], 5);
    client.remove(&sandbox);
}

/// C9: no exit code is lost or swapped among two hundred commands, and nothing unreaped is left.
#[test]
fn two_hundred_commands_at_once_keep_their_own_exit_codes() {
    let client = shared().client();
    let sandbox = client.create("base");
    let workers: Vec<_> = (0..20)
        .map(|worker| {
            let (client, sandbox) = (client.clone(), sandbox.clone());
            thread::spawn(move || {
                for round in 0..10 {
                    let code = worker * 10 + round;
                    let ended = client.shell(&sandbox, &format!("(sleep 0.01 &) ; exit {code}"));
                    assert_eq!(ended["exit_code"], code, "{ended:#}");
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
    assert_eq!(client.output(&sandbox, "ps -o stat | grep -c '^Z' || true"), "0\n");
    client.remove(&sandbox);
}

fn short(stream: &Value) -> String {
    let mut stream = stream.clone();
    for key in ["text", "data"] {
        if let Some(text) = stream[key].as_str() {
            stream[key] = json!(format!("{} characters", text.len()));
        }
    }
    stream.to_string()
}
