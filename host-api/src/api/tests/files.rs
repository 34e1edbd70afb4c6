//! Files in and out.

use super::harness::Host;
use axum::body::Body;
use axum::http::Request;
use std::time::Duration;

#[tokio::test]
async fn files_go_in_and_out_byte_for_byte() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let path = format!("/v1/sandboxes/{id}/files?path=/home/user/x");
    let content: Vec<u8> = (0..300_000_u32).map(|i| (i % 251) as u8).collect();
    let put = host.put(&format!("{path}&mode=0755"), content.clone()).await;
    assert_eq!(put.status, 204, "{}", put.json);
    let got = host.get(&path).await;
    assert_eq!((got.bytes, &got.headers["content-length"]), (content, &"300000".parse().unwrap()));
    assert_eq!(got.headers["bivouac-file-mode"], "0644");
}

#[tokio::test]
async fn a_file_operation_fails_with_what_failed() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let missing = host.get(&format!("/v1/sandboxes/{id}/files?path=/nowhere")).await;
    assert_eq!((missing.status.as_u16(), missing.code()), (404, "file_not_found"));
    let full = host.put(&format!("/v1/sandboxes/{id}/files?path=/full"), vec![7; 5 << 20]).await;
    assert_eq!((full.status.as_u16(), full.code()), (507, "disk_full"));
    // Neither a fault of the guest nor a path nobody takes.
    let device = host.get(&format!("/v1/sandboxes/{id}/files?path=/dev/zero")).await;
    assert_eq!((device.status.as_u16(), device.code()), (409, "file_conflict"));
    assert!(device.json["detail"].as_str().unwrap().contains("not a regular file"), "{}", device.json);
    let events = host.get(&format!("/v1/events?sandbox_id={id}")).await.json;
    let kinds: Vec<_> =
        events["items"].as_array().unwrap().iter().map(|e| e["kind"].as_str().unwrap()).collect();
    assert!(!kinds.iter().any(|kind| kind.starts_with("file.")), "none of it is on record: {kinds:?}");
    let mode = host.put(&format!("/v1/sandboxes/{id}/files?path=/x&mode=99"), vec![]).await;
    assert_eq!(mode.code(), "invalid_field");
    assert_eq!(host.get(&format!("/v1/sandboxes/{id}/files")).await.code(), "invalid_query");
}

#[tokio::test]
async fn an_upload_that_breaks_off_leaves_the_old_file() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let path = format!("/v1/sandboxes/{id}/files?path=/x");
    host.put(&path, b"old".to_vec()).await;
    let pieces = futures_util::stream::iter([Ok(vec![b'n'; 100_000]), Err(std::io::Error::other("gone"))]);
    let request =
        Request::builder().method("PUT").uri(&path).header("authorization", format!("Bearer {}", host.key));
    let broken = host.raw(request.body(Body::from_stream(pieces)).unwrap()).await;
    assert!(broken.status.is_client_error());
    assert_eq!(host.get(&path).await.bytes, b"old");
}

#[tokio::test]
async fn a_path_that_is_not_text_is_refused_both_ways() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let path = format!("/v1/sandboxes/{id}/files?path=/home/%ff.txt");
    for refused in [host.put(&path, b"x".to_vec()).await, host.get(&path).await] {
        assert_eq!((refused.status.as_u16(), refused.code()), (400, "invalid_query"));
        assert!(refused.json["detail"].as_str().unwrap().contains("`path` is not UTF-8"), "{}", refused.json);
    }
    let guest = host.world.guest(&id).unwrap();
    assert!(guest.files.lock().unwrap().is_empty(), "nothing was written under another name");
    // Any text is a path, a replacement character that was meant included.
    let odd = format!("/v1/sandboxes/{id}/files?path=/home/%EF%BF%BD%26+%25");
    assert_eq!(host.put(&odd, b"odd".to_vec()).await.status, 204);
    assert!(guest.files.lock().unwrap().contains_key("/home/\u{fffd}& %"));
}

#[tokio::test]
async fn a_body_that_stalls_is_answered_and_nothing_comes_of_it() {
    let host = Host::with(|daemon| daemon.stall = Duration::from_millis(50)).await;
    let id = host.sandbox().await;
    let path = format!("/v1/sandboxes/{id}/files?path=/x");
    host.put(&path, b"old".to_vec()).await;
    let stalling = |method: &str, path: &str, begun: &'static [u8]| {
        use futures_util::StreamExt;
        let begun = futures_util::stream::iter([Ok::<_, std::io::Error>(begun)]);
        let body = Body::from_stream(begun.chain(futures_util::stream::pending()));
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        host.raw(request.header("authorization", format!("Bearer {}", host.key)).body(body).unwrap())
    };
    let commands = format!("/v1/sandboxes/{id}/commands");
    for refused in [
        stalling("PUT", &path, b"new").await,
        stalling("POST", &commands, b"{\"request_id\": \"a\", \"argv\": [\"echo\"]}").await,
        stalling("POST", "/v1/sandboxes", b"{\"template\": \"base\"").await,
    ] {
        assert_eq!((refused.status.as_u16(), refused.code()), (408, "request_timeout"), "{}", refused.json);
        assert_eq!(refused.headers["content-type"], "application/problem+json");
        assert_eq!(
            (&refused.json["retryable"], &refused.headers["connection"]),
            (&true.into(), &"close".parse().unwrap())
        );
    }
    assert_eq!(host.get(&path).await.bytes, b"old");
    assert_eq!(host.get(&commands).await.json["items"], serde_json::json!([]));
    assert_eq!(host.world.launches(), 1);
}
