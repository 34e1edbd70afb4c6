//! The command line.

use bivouac_tests::shared;
use serde_json::Value;
use std::{fs, process::Output};

fn run(args: &[&str]) -> Output {
    shared().cli().args(args).output().unwrap()
}

#[track_caller]
fn json(args: &[&str]) -> Value {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Streams and exit code of the guest's command are those of `bivouac run`, and nothing is left.
#[test]
fn run_passes_on_streams_and_exit_code_and_cleans_up() {
    let output = run(&["run", "base", "--", "sh", "-c", "echo out; echo err >&2; exit 9"]);
    assert_eq!(output.status.code(), Some(9), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout, b"out\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("err\n"));
    assert_eq!(run(&["run", "--timeout", "1s", "base", "--", "sleep", "100"]).status.code(), Some(124));
    assert_eq!(run(&["run", "base", "--", "no-such-program"]).status.code(), Some(127));
    let refused = run(&["run", "no-such-template", "--", "true"]);
    assert_eq!(refused.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no-such-template"));
}

/// The loop by hand: create, copy in, exec, copy out, remove.
#[test]
fn the_loop_by_hand() {
    let folder = tempfile::tempdir().unwrap();
    let (here, back) = (folder.path().join("here"), folder.path().join("back"));
    fs::write(&here, "print('from a file')\n").unwrap();
    let created = json(&["-o", "json", "create", "python"]);
    let id = created["id"].as_str().unwrap();
    let target = format!("{id}:/home/user/program.py");
    assert!(run(&["cp", here.to_str().unwrap(), &target]).status.success());
    let output = run(&["exec", id, "--", "python3", "program.py"]);
    assert_eq!(output.stdout, b"from a file\n", "{}", String::from_utf8_lossy(&output.stderr));
    assert!(run(&["cp", &target, back.to_str().unwrap()]).status.success());
    assert_eq!(fs::read(&here).unwrap(), fs::read(&back).unwrap());
    let listed = json(&["-o", "json", "ls"]);
    assert!(listed.to_string().contains(id));
    assert!(run(&["rm", id]).status.success());
    assert!(!String::from_utf8_lossy(&run(&["ls"]).stdout).contains(id));
}

/// X4: where these tests run, guests can run, and doctor says so.
#[test]
fn doctor_says_that_this_host_is_fit() {
    let report = json(&["-o", "json", "doctor"]);
    assert_eq!(report["fit"], true, "{report:#}");
    let found = report["findings"].as_array().unwrap();
    for name in ["syscall", "cmpxchg16b", "xsave", "popcnt", "int3", "speed", "vhost_vsock", "cgroup_v2"] {
        assert!(found.iter().any(|f| f["name"] == name && f["ok"] == true), "{name}: {report:#}");
    }
    let listeners = found.iter().find(|f| f["name"] == "vsock_listeners").unwrap();
    assert_eq!(listeners["ok"], true, "the daemon's own is no reason to warn: {listeners:#}");
    assert!(listeners["detail"].as_str().unwrap().contains("bivouacd"), "{listeners:#}");
}
