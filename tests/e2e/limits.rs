//! What a command can run out of in its machine.

use bivouac_tests::shared;
use serde_json::json;

/// C10, C17: memory that runs out ends the command, by name, and leaves the sandbox usable.
#[test]
fn memory_exhaustion_is_named_and_survived() {
    let client = shared().client();
    let sandbox = client.create("python");
    let script = "x = []\nwhile True: x.append(bytearray(1 << 20))";
    let ended = client.submit(&sandbox, json!({ "argv": ["python3", "-c", script] })).expect(200);
    assert_eq!(
        (&ended["status"], &ended["termination_reason"]),
        (&json!("signaled"), &json!("oom_killed")),
        "{ended:#}"
    );
    assert_eq!(ended["limits_hit"], json!(["memory"]), "{ended:#}");
    assert_eq!(client.output(&sandbox, "echo usable"), "usable\n");
    client.remove(&sandbox);
}

/// C10: a fork bomb ends at a limit of its own, which the result names, and what it leaves behind leaves room for others.
#[test]
fn fork_bombs_are_named_and_leave_room_for_the_next_command() {
    let client = shared().client();
    let sandbox = client.create("base");
    // Each ends when it is refused a process, and leaves all that it was given behind.
    for _ in 0..2 {
        let ended = client.shell(&sandbox, "while :; do sleep 1000 & done");
        assert_eq!(ended["status"], "exited", "{ended:#}");
        assert_eq!(ended["limits_hit"], json!(["pids"]), "{ended:#}");
        assert!(ended["detail"].as_str().is_some_and(|why| why.contains("process")), "{ended:#}");
    }
    // And one that goes on and on.
    client.shell(&sandbox, "b() { b | b & }; b");
    let next = client.shell(&sandbox, "echo room | cat");
    assert_eq!((&next["exit_code"], &next["stdout"]["text"]), (&json!(0), &json!("room\n")), "{next:#}");
    assert!(next.get("limits_hit").is_none(), "what others ran into is not its own: {next:#}");
    client.remove(&sandbox);
}

/// C11: in a machine whose disk is full commands run and say so, and it can be deleted as it is.
#[test]
fn a_full_disk_holds_up_neither_commands_nor_deletion() {
    let client = shared().client();
    let sandbox = client.create("base");
    let fill = "left=$(df -k . | awk 'NR == 2 { print $4 }'); fallocate -l $(((left - 4096) * 1024)) filler; \
                dd if=/dev/zero of=filler2 bs=4k";
    let ended = client.shell(&sandbox, fill);
    assert_ne!(ended["exit_code"], 0, "{ended:#}");
    assert!(ended["stderr"]["text"].as_str().unwrap().contains("No space left"), "{ended:#}");
    assert_eq!(client.output(&sandbox, "echo still here; wc -c < /etc/passwd > /dev/null"), "still here\n");
    client.remove(&sandbox);
}
