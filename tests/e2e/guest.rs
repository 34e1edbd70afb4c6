//! What a workload finds inside.

use bivouac_tests::shared;
use serde_json::json;

/// A1, B8: a kernel, processes, a file system and a network of its own.
#[test]
fn a_sandbox_is_a_machine_of_its_own() {
    let host = shared();
    let client = host.client();
    let sandbox = client.create("base");
    let inside = client.output(&sandbox, "uname -r");
    let outside = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_ne!(inside, outside, "the guest's kernel is not the host's");
    assert_eq!(
        client.output(&sandbox, "ls /sys/class/net"),
        "lo\n",
        "without an allow-list there is no device"
    );
    let processes = client.output(&sandbox, "ps -o comm | sort | uniq");
    assert!(!processes.contains("bivouacd") && processes.contains("agent"), "{processes}");
    client.remove(&sandbox);
}

/// G3: names resolve, whatever the image holds, and what a Linux userland expects is mounted.
#[test]
fn a_userland_finds_what_it_expects() {
    let client = shared().client();
    for template in ["base", "python"] {
        let sandbox = client.create(template);
        assert_eq!(
            client.output(&sandbox, "grep -c '127.0.0.1.*localhost' /etc/hosts; test -f /etc/resolv.conf"),
            "1\n"
        );
        assert_eq!(client.output(&sandbox, "hostname; cat /etc/hostname").lines().count(), 2);
        client.output(
            &sandbox,
            "test -w /tmp && test -c /dev/null && test -e /dev/pts/ptmx && test -d /proc/self/fd",
        );
        client.output(&sandbox, "echo x > /dev/shm/x && cat /dev/fd/0 < /dev/null");
        client.output(&sandbox, "grep -q cgroup2 /proc/mounts");
        client.remove(&sandbox);
    }
}

/// G1, G2: its own clock and randomness before the first command.
#[test]
fn sandboxes_have_the_time_and_share_no_random_numbers() {
    let client = shared().client();
    let sandboxes: Vec<String> = (0..2).map(|_| client.create("base")).collect();
    let mut drawn = Vec::new();
    for sandbox in &sandboxes {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let inside: u64 = client.output(sandbox, "date +%s").trim().parse().unwrap();
        assert!(inside.abs_diff(now) < 30, "the guest's clock says {inside}, the host's {now}");
        drawn.push(client.output(sandbox, "head -c 32 /dev/urandom | md5sum; hostname"));
    }
    assert_ne!(drawn[0], drawn[1]);
    for sandbox in &sandboxes {
        client.remove(sandbox);
    }
}

/// Decision 7 of the architecture: the image is shared, what a sandbox writes is its own.
#[test]
fn sandboxes_write_to_their_own_disks() {
    let client = shared().client();
    let (one, other) = (client.create("base"), client.create("base"));
    client.output(&one, "echo mine > here");
    assert_eq!(client.shell(&other, "cat here")["exit_code"], 1);
    client.remove(&one);
    client.remove(&other);
}

/// A guest that halts would look alive to its host for ever: a command cannot stop the machine, not as root either.
#[test]
fn a_command_cannot_power_the_machine_off() {
    let client = shared().client();
    let sandbox = client.create("base");
    for script in ["poweroff -f", "halt -f", "reboot -f"] {
        let request = json!({ "shell": script, "user": "root", "timeout_ms": 60_000 });
        let ended = client.submit(&sandbox, request).expect(200);
        assert_eq!(
            (&ended["status"], &ended["exit_code"]),
            (&json!("exited"), &json!(1)),
            "{script}: {ended:#}"
        );
    }
    assert_eq!(client.output(&sandbox, "echo still here"), "still here\n");
    client.remove(&sandbox);
}
