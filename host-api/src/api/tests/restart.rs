//! A daemon that ends without a word, and the one that starts after it.

use super::harness::Host;
use serde_json::json;
use std::time::Duration;

/// A command that the old daemon has sent to the guest.
async fn started(host: &Host, id: &str) -> String {
    let ran = host.run(id, json!({"request_id": "w", "argv": ["wait"], "background": true})).await;
    ran.json["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn sandboxes_and_their_commands_are_taken_up_again() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let command = started(&host, &id).await;
    let guest = host.world.guest(&id).unwrap();
    guest.drop_connections();
    let host = host.restart().await;
    guest.finish(5);

    let ended = host.get(&format!("/v1/sandboxes/{id}/commands/{command}?wait_ms=5000")).await.json;
    assert_eq!(
        (ended["exit_code"].as_i64(), ended["stdout"]["text"].as_str()),
        (Some(5), Some("before\nafter\n"))
    );
    let replayed = host.run(&id, json!({"request_id": "w", "argv": ["wait"], "background": true})).await;
    assert_eq!(replayed.json["id"], *command);
    assert_eq!(guest.started("wait"), 1);
    assert_eq!(
        host.run(&id, json!({"request_id": "n", "argv": ["echo", "x"]})).await.json["stdout"]["text"],
        "x\n"
    );
}

#[tokio::test]
async fn a_command_that_was_accepted_and_never_sent_is_started_once() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    // As a daemon leaves it that is killed between the two.
    sqlx::query(
        "INSERT INTO commands (id, sandbox_id, org, actor, request_id, fingerprint, argv, env, output_limit_bytes, \
         background, status, accepted_at) VALUES ('cmd_01arz3ndektsv4rrffq69g5fav', $1, 'default', 'k', 'r', 'f', \
         '[\"echo\",\"late\"]', '{}', 4096, 0, 'accepted', 1)",
    )
    .bind(&id)
    .execute(&sqlx::SqlitePool::connect(host.dir.path().join("store.db").to_str().unwrap()).await.unwrap())
    .await
    .unwrap();
    let host = host.restart().await;
    let path = format!("/v1/sandboxes/{id}/commands/cmd_01arz3ndektsv4rrffq69g5fav");
    let ended = host.get(&format!("{path}?wait_ms=5000")).await.json;
    assert_eq!(
        (ended["status"].as_str(), ended["stdout"]["text"].as_str()),
        (Some("exited"), Some("late\n"))
    );
    assert_eq!(host.world.guest(&id).unwrap().started("echo late"), 1);
}

#[tokio::test]
async fn a_machine_that_died_meanwhile_is_failed_and_its_commands_lost() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let command = started(&host, &id).await;
    let guest = host.world.guest(&id).unwrap();
    // The host lost the machine while no daemon was there to see it.
    crate::machine::Machines::release(
        &host.world,
        &crate::ids::SandboxId::parse(&id).unwrap(),
        crate::lifecycle::Scope::Machine,
    )
    .await
    .unwrap();
    drop(guest);
    let host = host.restart().await;
    let failed = host.until(&id, |sandbox| sandbox["state"] == "failed").await;
    assert!(["monitor_gone", "stopped"].contains(&failed["reason"]["code"].as_str().unwrap()), "{failed}");
    let lost = host.get(&format!("/v1/sandboxes/{id}/commands/{command}?wait_ms=5000")).await.json;
    assert_eq!(lost["status"], "lost");
}

#[tokio::test]
async fn a_creation_cut_short_is_begun_again() {
    let host = Host::new().await;
    host.world.order(|orders| orders.silent = true);
    let id = host.post("/v1/sandboxes?wait=0", json!({"template": "base"})).await.json["id"]
        .as_str()
        .unwrap()
        .to_owned();
    while host.world.guest(&id).is_none() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    host.world.order(|orders| orders.silent = false);
    let host = host.restart().await;
    host.until(&id, |sandbox| sandbox["state"] == "running").await;
    assert_eq!((host.world.launches(), host.world.held().len()), (2, 1));
}

#[tokio::test]
async fn a_delete_that_was_accepted_is_finished_and_orphans_are_released() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    host.world.order(|orders| orders.releases_fail = 1_000);
    assert_eq!(host.delete(&format!("/v1/sandboxes/{id}")).await.status, 202);
    host.world.leave_an_orphan();
    host.world.order(|orders| orders.releases_fail = 0);
    let host = host.restart().await;
    host.until(&id, |sandbox| sandbox["state"] == "deleted").await;
    while !host.world.held().is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let events = host.get(&format!("/v1/events?sandbox_id={id}")).await.json;
    let stops = events["items"].as_array().unwrap().iter().filter(|e| e["kind"] == "usage.stopped").count();
    assert_eq!(stops, 1);
}
