//! Create, delete, failure, deadline, usage.

use super::harness::Host;
use serde_json::json;
use std::time::Duration;

#[tokio::test]
async fn create_answers_when_the_sandbox_is_usable() {
    let host = Host::new().await;
    let made = host
        .post("/v1/sandboxes", json!({"template": "base", "env": {"B": "2"}, "metadata": {"k": "v"}}))
        .await;
    assert_eq!((made.status.as_u16(), made.json["state"].as_str()), (201, Some("running")));
    assert_eq!(made.json["disk_mib"], 1024);
    assert_eq!(made.json["metadata"]["k"], "v");
    assert!(made.json["phases"]["total_us"].is_u64());
    let id = made.json["id"].as_str().unwrap();
    assert_eq!(made.headers["location"].to_str().unwrap(), format!("/v1/sandboxes/{id}"));

    let guest = host.world.guest(id).unwrap();
    let told = guest.configured.lock().unwrap().clone().unwrap();
    assert!(
        told.env.contains(&("A".to_owned(), "1".to_owned()))
            && told.env.contains(&("B".to_owned(), "2".to_owned()))
    );
    assert_eq!(told.hostname, id.replace('_', "-"));
    assert_eq!(told.entropy.len(), 64);
    assert!(told.unix_time_ns > 0);
}

#[tokio::test]
async fn create_without_waiting_answers_at_once() {
    let host = Host::new().await;
    host.world.order(|orders| orders.silent = true);
    let made = host.post("/v1/sandboxes?wait=0", json!({"template": "base"})).await;
    assert_eq!((made.status.as_u16(), made.json["state"].as_str()), (202, Some("creating")));
    let id = made.json["id"].as_str().unwrap();
    while host.world.guest(id).is_none() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    host.world.announce(id);
    host.until(id, |sandbox| sandbox["state"] == "running").await;
}

#[tokio::test]
async fn the_same_request_id_makes_one_sandbox_however_often_and_at_once_it_is_sent() {
    let host = Host::new().await;
    let body = json!({"template": "base", "request_id": "one"});
    let sent = (0..10).map(|_| host.post("/v1/sandboxes", body.clone()));
    let answers = futures_util::future::join_all(sent).await;
    let first = &answers[0].json["id"];
    assert!(answers.iter().all(|answer| answer.status == 201 && answer.json["id"] == *first));
    assert_eq!(answers.iter().filter(|a| !a.headers.contains_key("idempotent-replayed")).count(), 1);
    assert_eq!((host.world.launches(), host.world.held().len()), (1, 1));

    let other =
        host.post("/v1/sandboxes", json!({"template": "base", "request_id": "one", "name": "x"})).await;
    assert_eq!((other.status.as_u16(), other.code()), (422, "request_id_reused"));
}

#[tokio::test]
async fn a_retry_that_comes_after_the_delete_gets_the_deleted_sandbox_and_makes_no_other() {
    let host = Host::new().await;
    let body = json!({"template": "base", "request_id": "one"});
    let first = host.post("/v1/sandboxes", body.clone()).await;
    let path = format!("/v1/sandboxes/{}", first.json["id"].as_str().unwrap());
    host.delete(&format!("{path}?wait=1")).await;
    let deleted = host.get(&path).await.json;
    assert_eq!(deleted["state"], "deleted");
    for query in ["", "?wait=0"] {
        let again = host.post(&format!("/v1/sandboxes{query}"), body.clone()).await;
        assert_eq!((again.status.as_u16(), &again.json), (200, &deleted));
        assert_eq!(again.headers["idempotent-replayed"], "true");
    }
    let other = json!({"template": "base", "request_id": "one", "name": "x"});
    assert_eq!(host.post("/v1/sandboxes", other).await.code(), "request_id_reused");
    assert_eq!(host.world.launches(), 1);
}

#[tokio::test]
async fn a_command_for_a_sandbox_that_does_not_run_is_told_the_state_and_whether_to_come_back() {
    let host = Host::new().await;
    host.world.order(|orders| orders.silent = true);
    let made = host.post("/v1/sandboxes?wait=0", json!({"template": "base"})).await;
    let id = made.json["id"].as_str().unwrap();
    let command = json!({"request_id": "a", "argv": ["echo"]});
    let early = host.run(id, command.clone()).await;
    assert_eq!((early.status.as_u16(), early.code()), (409, "sandbox_not_ready"));
    assert!(early.json["detail"].as_str().unwrap().contains("is creating"), "{}", early.json);
    assert_eq!(early.json["retryable"], true);
    assert!(early.json["retry_after_ms"].is_u64() && early.headers.contains_key("retry-after"));
    let file = host.get(&format!("/v1/sandboxes/{id}/files?path=x")).await;
    assert_eq!(file.code(), "sandbox_not_ready");

    while host.world.guest(id).is_none() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    host.world.announce(id);
    host.until(id, |sandbox| sandbox["state"] == "running").await;
    assert_eq!(host.run(id, command.clone()).await.status, 200, "the same request, sent again");

    host.delete(&format!("/v1/sandboxes/{id}?wait=1")).await;
    let late = host.run(id, json!({"request_id": "b", "argv": ["echo"]})).await;
    assert_eq!((late.code(), late.json["retryable"].as_bool()), ("sandbox_not_running", Some(false)));
    assert!(late.json["detail"].as_str().unwrap().contains("is deleted"), "{}", late.json);
}

#[tokio::test]
async fn a_sandbox_that_cannot_be_made_is_a_problem_with_its_id_and_reason_and_leaves_nothing() {
    let host = Host::new().await;
    host.world.order(|orders| orders.boot_fails = Some("no kernel".to_owned()));
    let made = host.post("/v1/sandboxes", json!({"template": "base"})).await;
    assert_eq!((made.status.as_u16(), made.code()), (500, "sandbox_failed"));
    assert_eq!(made.headers["content-type"], "application/problem+json");
    assert_eq!(
        (made.json["reason"].as_str(), made.json["retryable"].as_bool()),
        (Some("boot_failed"), Some(false))
    );
    assert!(made.json["detail"].as_str().unwrap().contains("no kernel"));

    let id = made.json["sandbox_id"].as_str().unwrap();
    let listed = host.get("/v1/sandboxes?state=failed").await;
    assert_eq!(listed.json["items"][0]["id"], *id);
    assert_eq!(listed.json["items"][0]["reason"]["code"], "boot_failed");
    while !host.world.held().is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(host.delete(&format!("/v1/sandboxes/{id}?wait=1")).await.json["state"], "deleted");
}

#[tokio::test]
async fn a_taken_address_on_the_host_costs_another_try_and_nothing_else() {
    let host = Host::new().await;
    host.world.order(|orders| orders.cids_taken = 2);
    host.sandbox().await;
    assert_eq!(host.world.launches(), 3);
}

#[tokio::test]
async fn a_delete_during_creation_wins() {
    let host = Host::new().await;
    host.world.order(|orders| orders.silent = true);
    let id = host.post("/v1/sandboxes?wait=0", json!({"template": "base"})).await.json["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let deleted = host.delete(&format!("/v1/sandboxes/{id}")).await;
    assert_eq!(deleted.status, 202);
    // The late result of the creation.
    host.world.announce(&id);
    let last = host.until(&id, |sandbox| sandbox["state"] == "deleted").await;
    assert!(last["running_at"].is_null());
    assert!(host.world.held().is_empty());
    assert_eq!(last["usage"]["wall_ms"], 0);
}

#[tokio::test]
async fn delete_is_durable_idempotent_and_ends_billing_when_it_is_accepted() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    host.daemon.clock.advance(5_000);
    host.world.order(|orders| orders.releases_fail = 2);
    let path = format!("/v1/sandboxes/{id}");
    let first = host.delete(&path).await;
    assert_eq!(first.status, 202);
    assert_eq!(first.json["delete_reason"], "request");

    let waiting = host.get(&path).await.json;
    assert_eq!(
        (waiting["state"].as_str(), waiting["usage"]["state"].as_str()),
        (Some("deleting"), Some("provisional"))
    );
    host.daemon.clock.advance(60_000);
    let last = host.until(&path["/v1/sandboxes/".len()..], |sandbox| sandbox["state"] == "deleted").await;
    let second = host.delete(&path).await;
    assert_eq!(second.bytes, first.bytes);

    let usage = host.get(&format!("/v1/usage?sandbox_id={id}")).await.json["items"][0].clone();
    assert_eq!(usage, last["usage"]);
    assert_eq!(usage["state"], "final");
    assert_eq!(usage["billing_ended_at"], first.json["delete_accepted_at"]);
    assert!(usage["released_at"].as_str() > usage["billing_ended_at"].as_str());
    let wall = usage["wall_ms"].as_i64().unwrap();
    assert!((5_000..6_000).contains(&wall), "{wall}");
    assert_eq!(usage["memory_mib_ms"].as_i64().unwrap(), wall * 128);

    let events = host.get(&format!("/v1/events?sandbox_id={id}")).await.json;
    let kinds: Vec<_> =
        events["items"].as_array().unwrap().iter().map(|e| e["kind"].as_str().unwrap()).collect();
    let expected =
        ["sandbox.creating", "sandbox.running", "sandbox.deleting", "usage.stopped", "sandbox.deleted"];
    assert_eq!(kinds, expected);
}

#[tokio::test]
async fn a_machine_that_dies_is_failed_its_commands_lost_and_it_can_be_deleted() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let waiting = host.run(&id, json!({"request_id": "w", "argv": ["wait"]}));
    let dying = async {
        while host.world.guest(&id).unwrap().started("wait") == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        host.world.guest(&id).unwrap().die("monitor_killed");
    };
    let (answer, ()) = tokio::join!(waiting, dying);
    assert_eq!((answer.status.as_u16(), answer.json["status"].as_str()), (200, Some("lost")));
    assert_eq!(answer.json["termination_reason"], "machine_died");
    assert_eq!(answer.json["stdout"]["text"], "before\n");

    let failed = host.get(&format!("/v1/sandboxes/{id}")).await.json;
    assert_eq!(
        (failed["state"].as_str(), failed["reason"]["code"].as_str()),
        (Some("failed"), Some("monitor_killed"))
    );
    let refused = host.run(&id, json!({"request_id": "x", "argv": ["echo"]})).await;
    assert_eq!((refused.status.as_u16(), refused.code()), (409, "sandbox_not_running"));
    assert!(refused.json["detail"].as_str().unwrap().contains("is failed"), "{}", refused.json);
    // What it had written is still there.
    let replayed = host.run(&id, json!({"request_id": "w", "argv": ["wait"]})).await;
    assert_eq!(replayed.json["stdout"]["text"], "before\n");
    host.delete(&format!("/v1/sandboxes/{id}?wait=1")).await;
    assert!(host.world.held().is_empty());
}

#[tokio::test]
async fn a_life_ends_when_its_time_has_come() {
    let host = Host::new().await;
    let made = host.post("/v1/sandboxes", json!({"template": "base", "ttl_ms": 50})).await;
    let last = host.until(made.json["id"].as_str().unwrap(), |sandbox| sandbox["state"] == "deleted").await;
    assert_eq!(last["delete_reason"], "ttl");
}

#[tokio::test]
async fn a_host_that_is_full_says_so_and_makes_nothing() {
    let host = Host::new().await;
    let full = host.post("/v1/sandboxes", json!({"template": "base", "memory_mib": 20_000})).await;
    assert_eq!((full.status.as_u16(), full.code()), (503, "host_capacity"));
    assert!(full.json["retry_after_ms"].is_u64() && full.headers.contains_key("retry-after"));
    assert!(host.get("/v1/sandboxes?state=all").await.json["items"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn room_is_given_back_and_taken_by_the_next() {
    let host = Host::new().await;
    let big = json!({"template": "base", "memory_mib": 16_000});
    let first = host.post("/v1/sandboxes", big.clone()).await;
    assert_eq!(host.post("/v1/sandboxes", big.clone()).await.code(), "host_capacity");
    host.delete(&format!("/v1/sandboxes/{}?wait=1", first.json["id"].as_str().unwrap())).await;
    assert_eq!(host.post("/v1/sandboxes", big).await.status, 201);
}

#[tokio::test]
async fn a_list_pages_in_the_order_things_were_made_and_leaves_out_the_deleted() {
    let host = Host::new().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(host.sandbox().await);
    }
    let page = host.get("/v1/sandboxes?limit=2").await.json;
    let cursor = page["next_cursor"].as_str().unwrap();
    // What is made meanwhile changes nothing before the cursor.
    made.push(host.sandbox().await);
    let rest = host.get(&format!("/v1/sandboxes?limit=9&cursor={cursor}")).await.json;
    assert!(rest["next_cursor"].is_null());
    let ids = |page: &serde_json::Value| -> Vec<String> {
        page["items"].as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!([ids(&page), ids(&rest)].concat(), made);

    host.delete(&format!("/v1/sandboxes/{}?wait=1", made[0])).await;
    assert_eq!(ids(&host.get("/v1/sandboxes").await.json), made[1..]);
    assert_eq!(ids(&host.get("/v1/sandboxes?state=deleted").await.json), made[..1]);
    assert_eq!(ids(&host.get("/v1/sandboxes?state=all").await.json), made);
}
