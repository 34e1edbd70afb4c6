//! Files up and down.

use bivouac_tests::shared;
use serde_json::json;

#[test]
fn files_go_up_and_down_byte_for_byte() {
    let client = shared().client();
    let sandbox = client.create("base");
    let content: Vec<u8> = (0..3_000_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    client.upload(&sandbox, "path=/home/user/blob&mode=0600", content.clone()).expect_success();
    assert_eq!(client.output(&sandbox, "stat -c '%s %a %U' blob"), "3000000 600 user\n");
    assert_eq!(client.download(&sandbox, "path=blob"), content);
    client.upload(&sandbox, "path=empty", "").expect_success();
    assert_eq!(client.download(&sandbox, "path=empty"), b"");
    client.remove(&sandbox);
}

#[test]
fn a_file_operation_that_cannot_be_done_says_why() {
    let client = shared().client();
    let sandbox = client.create("base");
    let get = |query: &str| client.get(&format!("/v1/sandboxes/{sandbox}/files?{query}"));
    get("path=missing").expect_problem(404, "file_not_found");
    get("path=/etc/shadow-like").expect_problem(404, "file_not_found");
    client.upload(&sandbox, "path=/root/mine", "x").expect_problem(403, "file_forbidden");
    client.upload(&sandbox, "path=/no/such/folder/file", "x").expect_problem(404, "file_not_found");
    client.upload(&sandbox, "path=/tmp", "x").expect_problem(409, "file_conflict");
    for device in ["/dev/tty", "/dev/zero"] {
        let problem = get(&format!("path={device}")).expect_problem(409, "file_conflict");
        assert!(problem["detail"].as_str().unwrap().contains("not a regular file"), "{problem:#}");
    }
    client.upload(&sandbox, "path=/dev/null&user=root", "x").expect_problem(409, "file_conflict");
    client.output(&sandbox, "test -c /dev/null");
    client.upload(&sandbox, "path=%ff", "x").expect_problem(400, "invalid_query");
    client.remove(&sandbox);
}

/// F2: a link planted by the workload does not lend it the agent's rights.
#[test]
fn a_link_does_not_take_an_upload_beyond_its_user() {
    let client = shared().client();
    let sandbox = client.create("base");
    client.output(&sandbox, "ln -s /root escape; ln -s /etc/passwd target");
    client.upload(&sandbox, "path=escape/owned", "x").expect_problem(403, "file_forbidden");
    // The link itself may be replaced, its target may not be written.
    client.upload(&sandbox, "path=target", "mine").expect_success();
    assert_eq!(client.output(&sandbox, "cat target; grep -c root: /etc/passwd"), "mine1\n");
    client.remove(&sandbox);
}

/// F3, C11: a full disk is said to be full, the old file is whole, and everything else still works.
#[test]
fn a_full_disk_refuses_an_upload_and_keeps_the_old_file() {
    let client = shared().client();
    let request = json!({ "template": "base" });
    let sandbox = client.post("/v1/sandboxes", &request).expect(201);
    let sandbox = sandbox["id"].as_str().unwrap();
    client.upload(sandbox, "path=keep", "old").expect_success();
    // All but the last megabytes by reservation, which is quick, and those by writing.
    let fill = "left=$(df -k . | awk 'NR == 2 { print $4 }'); fallocate -l $(((left - 4096) * 1024)) filler; \
                dd if=/dev/zero of=filler2 bs=4k 2>/dev/null; df -k . | awk 'NR == 2 { print ($4 < 1024) }'";
    assert_eq!(client.output(sandbox, fill), "1\n", "the disk is full");
    client.upload(sandbox, "path=keep", vec![1; 2 << 20]).expect_problem(507, "disk_full");
    assert_eq!(client.download(sandbox, "path=keep"), b"old");
    assert_eq!(client.output(sandbox, "rm filler filler2; ls -a | grep -c bivouac-upload || true"), "0\n");
    client.upload(sandbox, "path=keep", "new").expect_success();
    client.remove(sandbox);
}
