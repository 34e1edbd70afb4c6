//! Creating, listing, deleting, paying.

use bivouac_tests::{client::unique, shared};
use serde_json::json;
use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
};

/// A3, A19: the whole loop over the API.
#[test]
fn the_whole_loop_works_over_the_api() {
    let client = shared().client();
    let sandbox = client.create("python");
    let program = "import sys\ndata = open('in.txt').read()\nprint(data.upper(), end='')\n\
                   print('warned', file=sys.stderr)\nopen('out.txt', 'w').write(data[::-1])\nsys.exit(3)\n";
    client.upload(&sandbox, "path=program.py", program).expect_success();
    client.upload(&sandbox, "path=in.txt", "hello").expect_success();
    let ended = client.submit(&sandbox, json!({ "argv": ["python3", "program.py"] })).expect(200);
    assert_eq!(ended["status"], "exited", "{ended:#}");
    assert_eq!((&ended["exit_code"], &ended["stdout"]["text"]), (&json!(3), &json!("HELLO")), "{ended:#}");
    assert_eq!(ended["stderr"]["text"], "warned\n");
    assert_eq!(client.download(&sandbox, "path=out.txt"), b"olleh");
    let deleted = client.remove(&sandbox);
    let usage = client.get(&format!("/v1/usage?sandbox_id={sandbox}")).expect(200);
    let usage = &usage["items"][0];
    assert_eq!(usage["state"], "final", "{usage:#}");
    assert_eq!(usage["billing_ended_at"], deleted["delete_accepted_at"], "{usage:#}");
    assert!(usage["released_at"].as_str() >= usage["delete_accepted_at"].as_str(), "{usage:#}");
}

/// A4: no poll between `running` and the first command.
#[test]
fn running_means_usable() {
    let client = shared().client();
    for _ in 0..3 {
        let sandbox = client.create("base");
        assert_eq!(client.output(&sandbox, "echo ready"), "ready\n");
        client.remove(&sandbox);
    }
}

/// Retries, under "The API contract": one request id, one sandbox.
#[test]
fn creating_twice_with_one_request_id_makes_one_sandbox() {
    let client = shared().client();
    let request = json!({ "template": "base", "request_id": unique() });
    let attempts: Vec<_> = (0..4)
        .map(|_| {
            let (client, request) = (client.clone(), request.clone());
            thread::spawn(move || client.post("/v1/sandboxes", &request))
        })
        .collect();
    let replies: Vec<_> = attempts.into_iter().map(|attempt| attempt.join().unwrap()).collect();
    let id = replies[0].body["id"].clone();
    for reply in &replies {
        assert!(matches!(reply.status, 200 | 201), "{reply:?}");
        assert_eq!((&reply.body["id"], &reply.body["state"]), (&id, &json!("running")), "{reply:?}");
    }
    assert_eq!(replies.iter().filter(|reply| !reply.replayed).count(), 1);
    client.remove(id.as_str().unwrap());
}

/// A16: an accepted delete is final, in every state, and says the same when asked again.
#[test]
fn a_sandbox_can_be_deleted_while_it_is_being_created_and_stays_deleted() {
    let host = shared();
    let client = host.client();
    let sandbox = client.post("/v1/sandboxes?wait=0", &json!({ "template": "base" })).expect(202);
    let id = sandbox["id"].as_str().unwrap();
    let path = format!("/v1/sandboxes/{id}");
    let first = client.delete(&path).expect(202);
    let second = client.delete(&path).expect(202);
    assert_eq!(first, second);
    client.remove(id);
    let found = client.get(&path).expect(200);
    assert_eq!(found["state"], "deleted", "{found:#}");
    assert_eq!(found["usage"]["wall_ms"], 0, "never running, so never billed: {found:#}");
    assert!(host.monitors(id).is_empty() && host.cgroups(id).is_empty());
}

/// X3: what a sandbox held is gone when it is released.
#[test]
fn a_released_sandbox_leaves_nothing_behind() {
    let host = shared();
    let client = host.client();
    let sandbox = client.create("base");
    assert_eq!(host.monitors(&sandbox).len(), 1, "one monitor holds the lock");
    assert_eq!(host.cgroups(&sandbox).len(), 1);
    client.remove(&sandbox);
    assert!(host.monitors(&sandbox).is_empty() && host.cgroups(&sandbox).is_empty());
    assert!(!host.data.join("sandboxes").join(&sandbox).join("scratch.img").exists());
    let log = host.log_of(&sandbox);
    assert!(
        log.contains("deleted as asked") && !log.contains("killed"),
        "an end that was asked for is no fault:\n{log}"
    );
}

/// B9, L6: a deadline is kept without anybody asking.
#[test]
fn a_time_to_live_ends_the_sandbox() {
    let host = shared();
    let client = host.client();
    let sandbox =
        client.post("/v1/sandboxes?wait=0", &json!({ "template": "base", "ttl_ms": 2000 })).expect(202);
    let path = format!("/v1/sandboxes/{}", sandbox["id"].as_str().unwrap());
    host.eventually("the deadline passes", || client.get(&path).body["state"] == "deleted");
    assert_eq!(client.get(&path).expect(200)["delete_reason"], "ttl");
}

/// What callers send may hold secrets: nothing in the data folder is another user's to read.
#[test]
fn what_the_daemon_keeps_is_its_own_to_read() {
    let host = shared();
    let sandbox = host.client().create("base");
    let kept = walk(&host.data);
    assert!(kept.iter().any(|path| path.ends_with("store.db")), "{kept:?}");
    for path in kept {
        // A file that went meanwhile is nobody's to read.
        let Ok(found) = std::fs::symlink_metadata(&path) else { continue };
        assert_eq!(found.mode() & 0o077, 0, "{} has mode {:o}", path.display(), found.mode());
    }
    host.client().remove(&sandbox);
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(walk(&entry.path()));
        }
        found.push(entry.path());
    }
    found
}

/// Lists page without loss or repetition.
#[test]
fn lists_page_in_a_stable_order() {
    let client = shared().client();
    let made: Vec<String> = (0..3).map(|_| client.create("base")).collect();
    let mut seen = Vec::new();
    let mut path = "/v1/sandboxes?limit=2".to_owned();
    loop {
        let page = client.get(&path).expect(200);
        seen.extend(page["items"].as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap().to_owned()));
        match page["next_cursor"].as_str() {
            Some(cursor) => path = format!("/v1/sandboxes?limit=2&cursor={cursor}"),
            None => break,
        }
    }
    for sandbox in &made {
        assert_eq!(seen.iter().filter(|id| *id == sandbox).count(), 1, "{sandbox} in {seen:?}");
        client.remove(sandbox);
    }
}

/// B12: what was done is on record, outside the sandbox, and the record survives it.
#[test]
fn the_record_outlives_the_sandbox() {
    let client = shared().client();
    let sandbox = client.create("base");
    client.output(&sandbox, "true");
    client.remove(&sandbox);
    let events = client.get(&format!("/v1/events?sandbox_id={sandbox}&limit=100")).expect(200);
    let kinds: Vec<&str> =
        events["items"].as_array().unwrap().iter().map(|e| e["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds.iter().filter(|kind| **kind == "usage.stopped").count(), 1, "{kinds:?}");
    let stopped = kinds.iter().position(|kind| *kind == "usage.stopped");
    assert!(stopped > kinds.iter().position(|kind| kind.starts_with("command.")), "{kinds:?}");
}
