//! The store's constraints and guards, one by one.

use super::*;
use crate::ids::{CommandId, SandboxId};
use crate::lifecycle::{DeletionReason, Input, Reason, Scope, State, World};

async fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store.db")).await.unwrap();
    store.seed_cids(77).await.unwrap();
    (dir, store)
}

fn sandbox(request_id: Option<&str>) -> NewSandbox {
    NewSandbox {
        id: SandboxId::new().to_string(),
        org: "acme".to_owned(),
        actor: "key".to_owned(),
        request_id: request_id.map(str::to_owned),
        fingerprint: "f".to_owned(),
        name: None,
        metadata: "{}".to_owned(),
        env: r#"{"SECRET":"x"}"#.to_owned(),
        template: "base".to_owned(),
        template_version: "ver_1".to_owned(),
        vcpus: 2,
        memory_mib: 128,
        disk_mib: 1024,
        ttl_ms: None,
        at: 1_000,
    }
}

async fn new(store: &Store, request_id: Option<&str>) -> SandboxRow {
    match store.reserve_sandbox(&sandbox(request_id)).await.unwrap() {
        Reserved::New(row) => row,
        Reserved::Existing(row) => panic!("{} existed", row.id),
    }
}

async fn put(store: &Store, id: &str, input: Input) -> Applied {
    store.apply(id, &input, Details::default()).await.unwrap().unwrap()
}

fn command(sandbox: &str, request_id: &str) -> NewCommand {
    NewCommand {
        id: CommandId::new().to_string(),
        sandbox_id: sandbox.to_owned(),
        org: "acme".to_owned(),
        actor: "key".to_owned(),
        request_id: request_id.to_owned(),
        fingerprint: "f".to_owned(),
        argv: "[\"true\"]".to_owned(),
        cwd: None,
        env: "{}".to_owned(),
        user: None,
        stdin: b"secret input".to_vec(),
        timeout_ms: None,
        output_limit_bytes: 1024,
        background: false,
        at: 2_000,
    }
}

fn deletion(at: i64) -> Input {
    Input::Delete { at, reason: DeletionReason::Request }
}

#[tokio::test]
async fn commits_are_flushed_to_disk_before_they_return() {
    let (_dir, store) = store().await;
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&store.writer).await.unwrap();
    let sync: i64 = sqlx::query_scalar("PRAGMA synchronous").fetch_one(&store.writer).await.unwrap();
    assert_eq!((mode.as_str(), sync), ("wal", 2));
}

#[tokio::test]
async fn a_request_id_makes_one_sandbox_and_every_sandbox_has_a_cid_of_its_own() {
    let (_dir, store) = store().await;
    let first = new(&store, Some("r1")).await;
    let again = store.reserve_sandbox(&sandbox(Some("r1"))).await.unwrap();
    assert!(matches!(again, Reserved::Existing(row) if row.id == first.id));
    let second = new(&store, Some("r2")).await;
    assert_ne!(first.cid, second.cid);
    assert!(first.cid.unwrap() >= 1024);
}

#[tokio::test]
async fn no_late_result_changes_a_sandbox_whose_delete_was_accepted() {
    let (_dir, store) = store().await;
    let id = new(&store, None).await.id;
    put(&store, &id, deletion(5_000)).await;
    let late = put(&store, &id, Input::Usable { at: 6_000 }).await;
    assert!(!late.changed);
    assert_eq!(late.row.state, "deleting");
    assert_eq!(late.world, [World::Release(Scope::Everything)]);
}

#[tokio::test]
async fn the_guard_is_in_the_statement_and_holds_even_if_the_row_was_read_before_the_delete() {
    let (_dir, store) = store().await;
    let id = new(&store, None).await.id;
    put(&store, &id, deletion(5_000)).await;
    let changed =
        sqlx::query("UPDATE sandboxes SET state = 'running' WHERE id = $1 AND delete_accepted_at IS NULL")
            .bind(&id)
            .execute(&store.writer)
            .await
            .unwrap()
            .rows_affected();
    assert_eq!(changed, 0);
}

#[tokio::test]
async fn metering_stops_in_the_transaction_of_the_release_with_the_accepted_time() {
    let (_dir, store) = store().await;
    let id = new(&store, None).await.id;
    put(&store, &id, Input::Usable { at: 2_000 }).await;
    put(&store, &id, deletion(7_000)).await;
    let everything = Input::Released { at: 60_000, scope: Scope::Everything };
    let released = put(&store, &id, everything.clone()).await;
    put(&store, &id, everything).await;

    assert_eq!((released.row.state.as_str(), released.row.released_at), ("deleted", Some(60_000)));
    assert_eq!((released.row.cid, released.row.env.as_str()), (None, "{}"));
    let events = store.events("acme", Some(&id), 0, 100).await.unwrap();
    let stops: Vec<_> = events.iter().filter(|event| event.kind == "usage.stopped").collect();
    assert_eq!(stops.len(), 1);
    assert!(stops[0].data.contains("\"billing_ended_at\":\"1970-01-01T00:00:07.000Z\""));
    assert!(stops[0].data.contains("\"wall_ms\":5000"));
}

#[tokio::test]
async fn a_request_id_is_accepted_once_and_only_by_a_sandbox_that_runs() {
    let (_dir, store) = store().await;
    let id = new(&store, None).await.id;
    let early = store.accept_command(&command(&id, "a"), 10).await.unwrap();
    assert!(matches!(early, Accepted::NotRunning(State::Creating)));
    put(&store, &id, Input::Usable { at: 2_000 }).await;
    let Accepted::New(first) = store.accept_command(&command(&id, "a"), 10).await.unwrap() else { panic!() };
    let again = store.accept_command(&command(&id, "a"), 10).await.unwrap();
    assert!(matches!(again, Accepted::Existing(row) if row.id == first.id));
    assert!(matches!(store.accept_command(&command(&id, "b"), 1).await.unwrap(), Accepted::TooMany));
    // The constraint itself, whatever the code before it does.
    let twice = sqlx::query(
        "INSERT INTO commands (id, sandbox_id, org, actor, request_id, fingerprint, argv, output_limit_bytes, \
         background, status, accepted_at) SELECT 'other', sandbox_id, org, actor, request_id, fingerprint, argv, \
         output_limit_bytes, background, status, accepted_at FROM commands WHERE id = $1",
    )
    .bind(&first.id)
    .execute(&store.writer)
    .await;
    assert!(twice.unwrap_err().as_database_error().unwrap().is_unique_violation());
}

#[tokio::test]
async fn a_machine_that_dies_loses_its_unfinished_commands_in_the_same_transaction() {
    let (_dir, store) = store().await;
    let id = new(&store, None).await.id;
    put(&store, &id, Input::Usable { at: 2_000 }).await;
    let Accepted::New(row) = store.accept_command(&command(&id, "a"), 10).await.unwrap() else { panic!() };
    put(&store, &id, Input::Died { at: 3_000, reason: Reason::new("monitor_killed", "signal 9") }).await;

    let lost = store.command(&id, &row.id).await.unwrap().unwrap();
    assert_eq!((lost.status.as_str(), lost.ended_at), ("lost", Some(3_000)));
    assert_eq!((lost.stdin, lost.env), (None, None));
    let end = Finished {
        status: CommandStatus::Exited,
        at: 4_000,
        started_at: None,
        exit_code: Some(0),
        signal: None,
        termination_reason: None,
        detail: None,
        stdout_bytes: 0,
        stderr_bytes: 0,
        wall_us: None,
        user_us: None,
        system_us: None,
        max_rss_kib: None,
        limits_hit: Vec::new(),
    };
    assert!(!store.finish_command(&row.id, &end).await.unwrap());
}

#[tokio::test]
async fn a_disk_without_room_is_told_from_other_failures_and_nothing_of_the_write_stays() {
    let (_dir, store) = store().await;
    let pages: i64 = sqlx::query_scalar("PRAGMA page_count").fetch_one(&store.writer).await.unwrap();
    let limit = |pages: i64| sqlx::query(sqlx::AssertSqlSafe(format!("PRAGMA max_page_count = {pages}")));
    limit(pages).execute(&store.writer).await.unwrap();
    let big = NewSandbox { metadata: "x".repeat(100_000), ..sandbox(Some("a")) };
    let full = store.reserve_sandbox(&big).await.unwrap_err();
    assert!(full.disk_full(), "{full}");
    assert_eq!(crate::error::Problem::from(full).code, crate::error::Code::HostDiskFull);
    assert!(store.sandbox(&big.id).await.unwrap().is_none());
    assert!(store.events("acme", None, 0, 10).await.unwrap().is_empty());

    limit(1 << 30).execute(&store.writer).await.unwrap();
    assert!(matches!(store.reserve_sandbox(&big).await.unwrap(), Reserved::New(_)), "there is room again");
    assert!(!StoreError::Unknown("other".to_owned()).disk_full());
}

#[tokio::test]
async fn a_transaction_that_the_database_ended_by_itself_does_not_stop_the_next() {
    let (_dir, store) = store().await;
    let mut tx = store.write().await.unwrap();
    // As SQLite does it when a write to a full disk fails.
    sqlx::query("ROLLBACK").execute(&mut *tx).await.unwrap();
    assert!(tx.commit().await.is_err());
    for _ in 0..3 {
        new(&store, None).await;
    }
}

#[tokio::test]
async fn the_audit_trail_is_a_chain() {
    let (_dir, store) = store().await;
    let id = new(&store, None).await.id;
    put(&store, &id, Input::Usable { at: 2_000 }).await;
    put(&store, &id, deletion(3_000)).await;
    let events = store.events("acme", None, 0, 100).await.unwrap();
    assert_eq!(events.len(), 3);
    let mut prev = String::new();
    for event in &events {
        assert_eq!(event.prev_hash, prev);
        assert_eq!(event.hash, link(event));
        prev = event.hash.clone();
    }
    let mut forged = events[1].clone();
    forged.data = "{}".to_owned();
    assert_ne!(link(&forged), forged.hash);
}

#[tokio::test]
async fn an_old_timer_does_not_end_a_renewed_life() {
    let (_dir, store) = store().await;
    let row = match store.reserve_sandbox(&NewSandbox { ttl_ms: Some(50), ..sandbox(None) }).await.unwrap() {
        Reserved::New(row) => row,
        Reserved::Existing(_) => panic!(),
    };
    let (due, next) = store.expired(1_049).await.unwrap();
    assert_eq!((due, next), (vec![], Some(1_050)));
    let (due, next) = store.expired(1_050).await.unwrap();
    assert_eq!((due, next), (vec![(row.id.clone(), 1_050)], None));
    let stale = Details { if_expires_at: Some(999), ..Details::default() };
    let applied = store.apply(&row.id, &deletion(2_000), stale).await.unwrap().unwrap();
    assert_eq!((applied.changed, applied.row.delete_accepted_at), (false, None));
}

#[tokio::test]
async fn cids_are_not_used_twice_and_wrap_around() {
    let (_dir, store) = store().await;
    store.set_meta("next_cid", &((1_i64 << 31) - 1).to_string()).await.unwrap();
    let last = new(&store, None).await;
    let first = new(&store, None).await;
    assert_eq!((last.cid, first.cid), (Some((1 << 31) - 1), Some(1024)));
    store.set_meta("next_cid", "1024").await.unwrap();
    assert_eq!(new(&store, None).await.cid, Some(1025));
    assert_eq!(store.change_cid(&first.id).await.unwrap(), Some(1026));
}
