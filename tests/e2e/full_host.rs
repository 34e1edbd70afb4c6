//! A host whose disk is full: said as such, nothing lost, and all as before once there is room.

use bivouac_tests::{Host, client::unique};
use serde_json::json;
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

/// A small disk of its own, in memory.
struct Disk(PathBuf);

impl Disk {
    fn new(mib: u32) -> Self {
        let folder = PathBuf::from(format!("/var/lib/bivouac/small-disk-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let size = format!("size={mib}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "none"]).arg(&folder).status();
        assert!(mounted.unwrap().success(), "mounting {}", folder.display());
        Self(folder)
    }

    /// Takes all the room there is; the file to remove to have it back.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = fs::File::create(&path).unwrap();
        while file.write_all(&[1; 4096]).is_ok() {}
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = fs::remove_dir(&self.0);
    }
}

/// C11 on the host: refusals name the full disk, what runs goes on, its output waits, and the same requests succeed later.
#[test]
fn a_host_without_room_refuses_by_name_and_loses_nothing() {
    let disk = Disk::new(64);
    let host = Host::start_in(&disk.0);
    let client = host.client();
    let (sandbox, second) = (client.create("base"), client.create("base"));
    let running = "trap 'go=1' USR1; echo up; while [ -z \"$go\" ]; do sleep 0.1; done; seq 1 200000";
    let request = json!({ "shell": running, "background": true, "output_limit_bytes": 4 << 20 });
    let command = client.submit(&sandbox, request).expect_success();
    let path = format!("/v1/sandboxes/{sandbox}/commands/{}", command["id"].as_str().unwrap());
    host.eventually("its output arrives", || client.get(&path).body["stdout"]["text"] == "up\n");

    let filler = disk.fill();
    let refused =
        json!({ "request_id": unique(), "shell": "test ! -e late && echo run >> count; wc -l < count" });
    let problem = client.submit(&sandbox, refused.clone()).expect_problem(507, "host_disk_full");
    assert_eq!(problem["retryable"], true, "{problem:#}");
    let creation = json!({ "template": "base", "request_id": unique() });
    client.post("/v1/sandboxes", &creation).expect_problem(507, "host_disk_full");
    assert_eq!(client.sandboxes(), [sandbox.as_str(), second.as_str()], "nothing came of it");
    assert_eq!(sandboxes(&host.data), 2, "nothing was left of it");
    client.upload(&sandbox, "path=late", "x").expect_problem(507, "host_disk_full");
    // More than the guest holds back by itself: it has to wait, and to come through all the same.
    assert!(client.post(&format!("{path}/signal"), &json!({ "signal": "USR1" })).status < 300);
    client.submit(&sandbox, refused.clone()).expect_problem(507, "host_disk_full");
    assert_eq!(client.get(&path).expect(200)["status"], "running");
    // What makes room is not refused for want of it.
    assert_eq!(client.remove(&second)["state"], "deleted");

    fs::remove_file(filler).unwrap();
    let ended = client.get(&format!("{path}?wait_ms=120000")).expect(200);
    assert_eq!((&ended["status"], &ended["exit_code"]), (&json!("exited"), &json!(0)), "{ended:#}");
    let expected: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    assert!(ended["stdout"]["text"].as_str() == Some(&format!("up\n{expected}")), "every byte is there");
    assert_eq!(client.submit(&sandbox, refused).expect(200)["stdout"]["text"], "1\n", "it ran once");
    let other = client.post("/v1/sandboxes", &creation).expect(201);
    client.remove(other["id"].as_str().unwrap());
    client.remove(&sandbox);
}

fn sandboxes(data: &Path) -> usize {
    fs::read_dir(data.join("sandboxes")).unwrap().count()
}
