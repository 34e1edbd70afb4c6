//! Monitors and daemons that die. Each test has a daemon of its own.

use bivouac_tests::{Host, client::unique};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::thread;

/// Point 7 of the lifecycle: a machine that dies is `failed`, its command `lost`, and nothing of it stays.
#[test]
fn a_monitor_that_is_killed_fails_its_sandbox_and_loses_its_command() {
    let host = Host::start();
    let client = host.client();
    let (doomed, other) = (client.create("base"), client.create("base"));
    let running = {
        let (client, doomed) = (client.clone(), doomed.clone());
        thread::spawn(move || client.submit(&doomed, json!({ "shell": "echo begun; sleep 1000" })))
    };
    host.eventually("the command runs", || client.running_commands(&doomed) == 1);
    for pid in host.monitors(&doomed) {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
    let lost = running.join().unwrap().expect(200);
    assert_eq!(lost["status"], "lost", "{lost:#}");
    let path = format!("/v1/sandboxes/{doomed}");
    host.eventually("the sandbox fails", || client.get(&path).body["state"] == "failed");
    let failed = client.get(&path).expect(200);
    assert!(failed["reason"]["detail"].as_str().is_some_and(|why| !why.is_empty()), "{failed:#}");
    host.eventually("nothing is left", || {
        host.monitors(&doomed).is_empty() && host.cgroups(&doomed).is_empty()
    });
    client.submit(&doomed, json!({ "argv": ["true"] })).expect_problem(409, "sandbox_not_running");
    assert_eq!(client.output(&other, "echo unharmed"), "unharmed\n");
    client.remove(&doomed);
    client.remove(&other);
}

/// X2, C18: a daemon that is killed and started again finds its sandboxes, and the commands that ran meanwhile.
#[test]
fn sandboxes_and_commands_survive_a_killed_daemon() {
    let mut host = Host::start();
    let client = host.client();
    let sandbox = client.create("base");
    client.output(&sandbox, "echo kept > file");
    let request = json!({
        "request_id": unique(),
        "shell": "echo run >> count; echo one; sleep 6; echo two; exit 4",
    });
    {
        let (client, sandbox, request) = (client.clone(), sandbox.clone(), request.clone());
        // Its connection breaks with the daemon; what becomes of the answer is not the point.
        thread::spawn(move || {
            let path = format!("/v1/sandboxes/{sandbox}/commands");
            let _ = client.request(reqwest::Method::POST, &path).json(&request).send();
        });
    }
    host.eventually("the command runs", || client.running_commands(&sandbox) == 1);
    host.kill();
    assert_eq!(host.monitors(&sandbox).len(), 1, "the monitor lives on");
    host.restart();

    let client = host.client();
    assert_eq!(client.get(&format!("/v1/sandboxes/{sandbox}")).expect(200)["state"], "running");
    assert_eq!(client.output(&sandbox, "cat file"), "kept\n");
    let ended = client.submit(&sandbox, request).expect(200);
    assert_eq!((&ended["status"], &ended["exit_code"]), (&json!("exited"), &json!(4)), "{ended:#}");
    assert_eq!(ended["stdout"]["text"], "one\ntwo\n");
    assert_eq!(client.output(&sandbox, "wc -l < count"), "1\n", "it ran once");
    client.remove(&sandbox);
    assert!(host.monitors(&sandbox).is_empty() && host.cgroups(&sandbox).is_empty());
}

/// L5, X3: what died while the daemon was away is found and released.
#[test]
fn a_machine_that_died_while_the_daemon_was_away_is_released() {
    let mut host = Host::start();
    let client = host.client();
    let sandbox = client.create("base");
    host.kill();
    for pid in host.monitors(&sandbox) {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
    host.restart();
    let client = host.client();
    let path = format!("/v1/sandboxes/{sandbox}");
    host.eventually("it is found dead", || client.get(&path).body["state"] == "failed");
    host.eventually("nothing is left", || host.cgroups(&sandbox).is_empty());
    client.remove(&sandbox);
}

/// L1, L8, A16: an accepted delete goes on after a crash, and leftovers hold nothing up.
#[test]
fn a_delete_that_was_accepted_is_finished_after_a_crash() {
    let mut host = Host::start();
    let client = host.client();
    let sandbox = client.create("base");
    let accepted = client.delete(&format!("/v1/sandboxes/{sandbox}")).expect(202);
    host.kill();
    host.restart();
    let client = host.client();
    let path = format!("/v1/sandboxes/{sandbox}");
    host.eventually("it is released", || client.get(&path).body["state"] == "deleted");
    let found = client.get(&path).expect(200);
    assert_eq!(found["usage"]["billing_ended_at"], accepted["delete_accepted_at"], "{found:#}");
    assert!(host.monitors(&sandbox).is_empty() && host.cgroups(&sandbox).is_empty());
    let next = client.create("base");
    client.remove(&next);
}
