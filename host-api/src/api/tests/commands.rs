//! Commands, their output, and files.

use super::harness::Host;
use axum::body::Body;
use axum::http::Request;
use serde_json::json;
use std::time::Duration;

#[tokio::test]
async fn a_command_answers_with_its_streams_and_exit_code() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let ran = host.run(&id, json!({"request_id": "a", "argv": ["both"]})).await;
    assert_eq!(
        (ran.status.as_u16(), ran.json["status"].as_str(), ran.json["exit_code"].as_i64()),
        (200, Some("exited"), Some(0))
    );
    assert_eq!(
        (ran.json["stdout"]["text"].as_str(), ran.json["stderr"]["text"].as_str()),
        (Some("out"), Some("err"))
    );
    assert_eq!(ran.json["stdout"]["truncated"], false);
    assert!(ran.json["signal"].is_null() && ran.json["termination_reason"].is_null());
    let code = host.run(&id, json!({"request_id": "b", "argv": ["exit", "3"]})).await;
    assert_eq!(code.json["exit_code"], 3);
    // The agent was told that it may forget.
    while host.world.guest(&id).unwrap().released.lock().unwrap().len() < 2 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn every_way_to_end_has_its_status_and_reason() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let missing = host.run(&id, json!({"request_id": "m", "argv": ["nothing-like-it"]})).await.json;
    assert_eq!(
        (missing["status"].as_str(), missing["termination_reason"].as_str()),
        (Some("start_failed"), Some("not_found"))
    );
    assert!(
        missing["exit_code"].is_null() && missing["detail"].as_str().unwrap().contains("nothing-like-it")
    );
    let late = host.run(&id, json!({"request_id": "t", "argv": ["sleep"], "timeout_ms": 20})).await.json;
    assert_eq!(
        (late["status"].as_str(), late["termination_reason"].as_str()),
        (Some("timed_out"), Some("timeout"))
    );
    assert_eq!(late["stdout"]["text"], "before\n");
    let oom = host.run(&id, json!({"request_id": "o", "argv": ["oom"]})).await.json;
    assert_eq!((oom["signal"].as_i64(), oom["termination_reason"].as_str()), (Some(9), Some("oom_killed")));
    assert_eq!(oom["limits_hit"], json!(["memory"]));
    let forked = host.run(&id, json!({"request_id": "f", "argv": ["fork"]})).await.json;
    assert_eq!((forked["status"].as_str(), forked["exit_code"].as_i64()), (Some("exited"), Some(2)));
    assert_eq!(forked["limits_hit"], json!(["pids"]));
    assert!(forked["detail"].as_str().unwrap().contains("refused it a process"), "{forked}");
    let listed = host.get(&format!("/v1/sandboxes/{id}/commands")).await.json;
    assert_eq!(listed["items"][3]["limits_hit"], json!(["pids"]));
    assert!(listed["items"][0].get("limits_hit").is_none(), "nothing ran out");
    let events = host.get(&format!("/v1/events?sandbox_id={id}")).await.json;
    let last = events["items"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&last["kind"], &last["data"]["limits_hit"]), (&json!("command.ended"), &json!(["pids"])));
    assert_eq!(host.get(&format!("/v1/sandboxes/{id}")).await.json["state"], "running");
}

#[tokio::test]
async fn ten_submissions_of_one_request_id_run_once_and_all_see_the_result() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let sent = (0..10).map(|_| host.run(&id, json!({"request_id": "same", "argv": ["echo", "hi"]})));
    let answers = futures_util::future::join_all(sent).await;
    assert!(
        answers
            .iter()
            .all(|a| a.status == 200 && a.json == answers[0].json && a.json["stdout"]["text"] == "hi\n")
    );
    assert_eq!(answers.iter().filter(|a| !a.headers.contains_key("idempotent-replayed")).count(), 1);
    assert_eq!(host.world.guest(&id).unwrap().started("echo hi"), 1);

    let other = host.run(&id, json!({"request_id": "same", "argv": ["echo", "ho"]})).await;
    assert_eq!((other.status.as_u16(), other.code()), (422, "request_id_reused"));
    // Only the wait differs: the same request.
    let patient = host.run(&id, json!({"request_id": "same", "argv": ["echo", "hi"], "wait_ms": 5})).await;
    assert_eq!(patient.json["id"], answers[0].json["id"]);
}

#[tokio::test]
async fn a_wait_bounds_the_wait_and_not_the_command() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let body = json!({"request_id": "w", "argv": ["wait"]});
    let first = host.post(&format!("/v1/sandboxes/{id}/commands?wait_ms=30"), body.clone()).await;
    assert_eq!((first.status.as_u16(), first.json["status"].as_str()), (202, Some("running")));
    let command = first.json["id"].as_str().unwrap();
    host.world.guest(&id).unwrap().finish(4);
    let seen = host.get(&format!("/v1/sandboxes/{id}/commands/{command}?wait_ms=5000")).await;
    assert_eq!(
        (seen.json["exit_code"].as_i64(), seen.json["stdout"]["text"].as_str()),
        (Some(4), Some("before\nafter\n"))
    );
    assert_eq!(host.run(&id, body).await.json["exit_code"], 4);
    let listed = host.get(&format!("/v1/sandboxes/{id}/commands")).await.json;
    assert_eq!(listed["items"][0]["id"], *command);
    assert!(listed["items"][0]["stdout"].is_null());
}

#[tokio::test]
async fn a_command_in_the_background_answers_when_it_has_started() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let started = host.run(&id, json!({"request_id": "bg", "argv": ["wait"], "background": true})).await;
    assert_eq!((started.status.as_u16(), started.json["status"].as_str()), (202, Some("running")));
}

#[tokio::test]
async fn a_caller_who_hangs_up_stops_nothing() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let body = json!({"request_id": "h", "argv": ["wait"]});
    let gone = tokio::time::timeout(Duration::from_millis(50), host.run(&id, body.clone())).await;
    assert!(gone.is_err());
    host.world.guest(&id).unwrap().finish(0);
    assert_eq!(host.run(&id, body).await.json["status"], "exited");
    assert_eq!(host.world.guest(&id).unwrap().started("wait"), 1);
}

#[tokio::test]
async fn a_broken_connection_to_the_guest_is_taken_up_where_it_was() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let breaking = async {
        let guest = host.world.guest(&id).unwrap();
        while guest.started("wait") == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        guest.drop_connections();
        guest.finish(0);
    };
    let (ran, ()) = tokio::join!(host.run(&id, json!({"request_id": "b", "argv": ["wait"]})), breaking);
    assert_eq!(
        (ran.json["status"].as_str(), ran.json["stdout"]["text"].as_str()),
        (Some("exited"), Some("before\nafter\n"))
    );
    assert_eq!(host.world.guest(&id).unwrap().started("wait"), 1);
}

#[tokio::test]
async fn standard_input_is_what_was_sent_and_then_ends() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let text = host.run(&id, json!({"request_id": "t", "argv": ["cat"], "stdin": "grüße"})).await;
    assert_eq!(text.json["stdout"]["text"], "grüße");
    let bytes = json!({"request_id": "b", "argv": ["cat"], "stdin": {"encoding": "base64", "data": "/wA="}});
    assert_eq!(host.run(&id, bytes).await.json["stdout"]["data"], "/wA=");
    let large = json!({"request_id": "l", "argv": ["cat"], "stdin": "x".repeat(1 << 20)});
    assert_eq!(host.run(&id, large).await.json["stdout"]["bytes_total"], 1 << 20);
}

#[tokio::test]
async fn output_past_the_limit_keeps_head_and_tail_and_says_what_it_dropped() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let ran = host
        .run(&id, json!({"request_id": "o", "argv": ["bytes", "300000"], "output_limit_bytes": 2048}))
        .await
        .json;
    let stdout = &ran["stdout"];
    assert_eq!((stdout["bytes_total"].as_u64(), stdout["truncated"].as_bool()), (Some(300_000), Some(true)));
    assert_eq!(
        (stdout["omitted_at"].as_u64(), stdout["omitted_bytes"].as_u64()),
        (Some(1024), Some(300_000 - 2048))
    );
    assert_eq!(stdout["text"].as_str().unwrap().len(), 2048);

    let output = format!("/v1/sandboxes/{id}/commands/{}/output?stream=stdout", ran["id"].as_str().unwrap());
    let head = host.get(&output).await;
    assert_eq!((head.bytes.len(), &head.headers["bivouac-next-offset"]), (1024, &"1024".parse().unwrap()));
    let tail = host.get(&format!("{output}&offset=1024")).await;
    assert_eq!(tail.headers["bivouac-gap"], format!("1024-{}", 300_000 - 1024));
    assert_eq!((tail.bytes.len(), &tail.headers["bivouac-ended"]), (1024, &"true".parse().unwrap()));
    assert_eq!(tail.bytes[0], b'a' + u8::try_from((300_000 - 1024) % 26).unwrap());
    assert!(host.get(&format!("{output}&offset=300000")).await.bytes.is_empty());
    assert_eq!(host.get(&format!("{output}&offset=300001")).await.code(), "range_not_satisfiable");
}

#[tokio::test]
async fn binary_output_is_base64_and_raw_output_is_raw() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let ran = host.run(&id, json!({"request_id": "b", "argv": ["binary"]})).await.json;
    assert_eq!(
        (ran["stdout"]["encoding"].as_str(), ran["stdout"]["data"].as_str()),
        (Some("base64"), Some("/wD+"))
    );
    let command = ran["id"].as_str().unwrap();
    assert_eq!(
        host.get(&format!("/v1/sandboxes/{id}/commands/{command}/output")).await.bytes,
        [0xff, 0, 0xfe]
    );
}

#[tokio::test]
async fn cancel_and_signal_end_a_command_and_do_nothing_to_one_that_has_ended() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let mut paths = Vec::new();
    for name in ["a", "b"] {
        let ran = host.run(&id, json!({"request_id": name, "argv": ["wait"], "background": true})).await;
        paths.push(format!("/v1/sandboxes/{id}/commands/{}", ran.json["id"].as_str().unwrap()));
    }
    let canceled = host.send(&host.key, "POST", &format!("{}/cancel", paths[0]), None).await;
    assert_eq!((canceled.status.as_u16(), canceled.json["status"].as_str()), (200, Some("canceled")));
    assert_eq!(host.send(&host.key, "POST", &format!("{}/cancel", paths[0]), None).await.json, canceled.json);
    let late = host.post(&format!("{}/signal", paths[0]), json!({"signal": "TERM"})).await;
    assert_eq!((late.status.as_u16(), late.code()), (409, "command_not_running"));

    assert!(
        host.post(&format!("{}/signal", paths[1]), json!({"signal": "SIGUSR1"})).await.status.is_success()
    );
    let ended = host.get(&format!("{}?wait_ms=5000", paths[1])).await.json;
    assert_eq!((ended["status"].as_str(), ended["signal"].as_i64()), (Some("signaled"), Some(10)));
    assert_eq!(
        host.post(&format!("{}/signal", paths[1]), json!({"signal": "NO"})).await.code(),
        "invalid_field"
    );
}

#[tokio::test]
async fn a_delete_ends_the_commands_and_the_wait_for_them() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let path = format!("/v1/sandboxes/{id}");
    let deleting = async {
        while host.world.guest(&id).unwrap().started("wait") == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        host.delete(&path).await
    };
    let (ran, _) = tokio::join!(host.run(&id, json!({"request_id": "w", "argv": ["wait"]})), deleting);
    assert_eq!(
        (ran.json["status"].as_str(), ran.json["termination_reason"].as_str()),
        (Some("lost"), Some("sandbox_deleted"))
    );
    host.until(&id, |sandbox| sandbox["state"] == "deleted").await;
    // The result outlives the sandbox.
    let replayed = host.run(&id, json!({"request_id": "w", "argv": ["wait"]})).await;
    assert_eq!((replayed.status.as_u16(), replayed.json["status"].as_str()), (200, Some("lost")));
}

#[tokio::test]
async fn a_stream_gives_every_byte_once_and_goes_on_from_the_last_event() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let ran = host.run(&id, json!({"request_id": "s", "argv": ["bytes", "200000"]})).await.json;
    let path = format!("/v1/sandboxes/{id}/commands/{}/stream", ran["id"].as_str().unwrap());
    let read = async |last: Option<&str>| -> Vec<(String, String, serde_json::Value)> {
        let request = Request::builder().uri(&path).header("authorization", format!("Bearer {}", host.key));
        let request = last.into_iter().fold(request, |request, last| request.header("last-event-id", last));
        let text = String::from_utf8(host.raw(request.body(Body::empty()).unwrap()).await.bytes).unwrap();
        text.split("\n\n")
            .filter(|event| !event.is_empty())
            .map(|event| {
                let field = |name: &str| {
                    event.lines().find_map(|l| l.strip_prefix(name)).unwrap_or("").trim().to_owned()
                };
                (field("event:"), field("id:"), serde_json::from_str(&field("data:")).unwrap())
            })
            .collect()
    };
    let all = read(None).await;
    let text = |events: &[(String, String, serde_json::Value)]| -> String {
        events.iter().filter_map(|(_, _, data)| data["text"].as_str()).collect()
    };
    assert_eq!(text(&all).len(), 200_000);
    assert_eq!(all.last().unwrap().0, "end");
    assert_eq!(all.last().unwrap().2["exit_code"], 0);
    let rest = read(Some(&all[0].1)).await;
    assert_eq!(format!("{}{}", text(&all[..1]), text(&rest)), text(&all));
}

#[tokio::test]
async fn a_stream_follows_a_command_that_runs() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let ran = host.run(&id, json!({"request_id": "s", "argv": ["wait"], "background": true})).await.json;
    let path = format!("/v1/sandboxes/{id}/commands/{}/stream", ran["id"].as_str().unwrap());
    let guest = host.world.guest(&id).unwrap();
    let finishing = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        guest.finish(0);
    };
    let (streamed, ()) = tokio::join!(host.get(&path), finishing);
    let text = String::from_utf8(streamed.bytes).unwrap();
    assert!(text.contains("before") && text.contains("after") && text.contains("event: end"), "{text}");
}
