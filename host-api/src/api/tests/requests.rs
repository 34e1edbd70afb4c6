//! Requests that are wrong, each told what is wrong with it.

use super::harness::Host;
use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

#[tokio::test]
async fn a_wrong_creation_is_told_which_field_is_wrong() {
    let host = Host::new().await;
    let cases = [
        (json!({"template": "nothing"}), 404, "template_not_found", "nothing"),
        (json!({"template": "../base"}), 404, "template_not_found", ".."),
        (json!({}), 400, "missing_field", "template"),
        (json!({"template": "base", "cpus": 2}), 400, "unknown_field", "cpus"),
        (json!({"template": "base", "vcpus": "2"}), 400, "invalid_field", "vcpus"),
        (json!({"template": "base", "vcpus": 0}), 400, "invalid_field", "vcpus"),
        (json!({"template": "base", "vcpus": -1}), 400, "invalid_field", "vcpus"),
        (json!({"template": "base", "memory_mib": 1}), 400, "invalid_field", "memory_mib"),
        (json!({"template": "base", "disk_mib": 99_999}), 400, "invalid_field", "disk_mib"),
        (json!({"template": "base", "ttl_ms": 0}), 400, "invalid_field", "ttl_ms"),
        (json!({"template": "base", "request_id": "with space"}), 400, "invalid_field", "request_id"),
        (json!({"template": "base", "request_id": ""}), 400, "invalid_field", "request_id"),
        (json!({"template": "base", "env": {"A=B": "x"}}), 400, "invalid_field", "env"),
        (json!({"template": "base", "env": {"A": 1}}), 400, "invalid_field", "env.A"),
        (json!([]), 400, "invalid_field", "expected a JSON object, not an array"),
        (json!(["base"]), 400, "invalid_field", "expected a JSON object, not an array"),
        (json!(null), 400, "invalid_field", "expected a JSON object, not null"),
        (json!("base"), 400, "invalid_field", "expected a JSON object, not a string"),
        (json!(7), 400, "invalid_field", "expected a JSON object, not a number"),
        (json!(true), 400, "invalid_field", "expected a JSON object, not a boolean"),
    ];
    for (body, status, code, named) in cases {
        let refused = host.post("/v1/sandboxes", body.clone()).await;
        assert_eq!((refused.status.as_u16(), refused.code()), (status, code), "{body}: {}", refused.json);
        let detail = refused.json["detail"].as_str().unwrap();
        assert!(detail.contains(named), "{body}: {detail}");
        assert!(!detail.contains("struct") && !detail.contains("CreateSandbox"), "{body}: {detail}");
        assert_eq!(refused.headers["content-type"], "application/problem+json");
    }
    assert_eq!(host.world.launches(), 0);
}

#[tokio::test]
async fn a_wrong_command_is_told_which_field_is_wrong() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let cases = [
        (json!({"argv": ["true"]}), "missing_field", "request_id"),
        (json!({"request_id": "a"}), "missing_field", "argv"),
        (json!({"request_id": "a", "argv": []}), "invalid_field", "argv"),
        (json!({"request_id": "a", "argv": [""]}), "invalid_field", "argv"),
        (json!({"request_id": "a", "argv": ["a\u{0}b"]}), "invalid_field", "argv"),
        (json!({"request_id": "a", "argv": ["x"], "shell": "x"}), "invalid_field", "shell"),
        (json!({"request_id": "a", "argv": "true"}), "invalid_field", "argv"),
        (json!({"request_id": "a", "argv": ["true"], "timeout": 5}), "unknown_field", "timeout"),
        (json!({"request_id": "a", "argv": ["true"], "timeout_ms": 0}), "invalid_field", "timeout_ms"),
        (
            json!({"request_id": "a", "argv": ["true"], "output_limit_bytes": 1}),
            "invalid_field",
            "output_limit_bytes",
        ),
        (
            json!({"request_id": "a", "argv": ["true"], "stdin": {"encoding": "base64", "data": "!"}}),
            "invalid_field",
            "stdin",
        ),
        (json!({"request_id": "a", "argv": ["true"], "stdin": 5}), "invalid_field", "stdin"),
        (json!({"request_id": "ü", "argv": ["true"]}), "invalid_field", "request_id"),
        (json!({"request_id": "a", "argv": ["x".repeat(600_000)]}), "invalid_field", "argv"),
        (json!({"request_id": "a", "argv": ["true"], "cwd": ""}), "invalid_field", "cwd"),
    ];
    for (body, code, named) in cases {
        let refused = host.run(&id, body.clone()).await;
        assert_eq!((refused.status.as_u16(), refused.code()), (400, code), "{named}: {}", refused.json);
        assert!(refused.json["detail"].as_str().unwrap().contains(named), "{}", refused.json);
    }
    assert!(
        host.get(&format!("/v1/sandboxes/{id}/commands")).await.json["items"].as_array().unwrap().is_empty()
    );
}

#[tokio::test]
async fn what_is_no_request_at_all_is_a_problem_too() {
    let host = Host::new().await;
    let send = async |method: &str, path: &str, kind: Option<&str>, body: Vec<u8>| {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("authorization", format!("Bearer {}", host.key));
        let request = kind.into_iter().fold(request, |request, kind| request.header("content-type", kind));
        let answer = host.raw(request.body(Body::from(body)).unwrap()).await;
        assert_eq!(answer.headers["content-type"], "application/problem+json", "{method} {path}");
        (answer.status.as_u16(), answer.code().to_owned())
    };
    let json = Some("application/json");
    let told = |status, code: &str| (status, code.to_owned());
    assert_eq!(
        send("POST", "/v1/sandboxes", json, b"{\"template\": ".to_vec()).await,
        told(400, "invalid_json")
    );
    assert_eq!(send("POST", "/v1/sandboxes", json, b"{} {}".to_vec()).await.1, "missing_field");
    assert_eq!(send("POST", "/v1/sandboxes", json, b"\xff".to_vec()).await, told(400, "invalid_json"));
    assert_eq!(
        send("POST", "/v1/sandboxes", None, b"{}".to_vec()).await,
        told(415, "unsupported_media_type")
    );
    let large = format!("{{\"template\": \"{}\"}}", "x".repeat(3 << 20)).into_bytes();
    assert_eq!(send("POST", "/v1/sandboxes", json, large).await, told(413, "body_too_large"));
    assert_eq!(send("GET", "/v1/nothing", None, vec![]).await, told(404, "route_not_found"));
    assert_eq!(send("PATCH", "/v1/sandboxes", None, vec![]).await, told(405, "method_not_allowed"));
    assert_eq!(send("GET", "/v1/sandboxes/%ff", None, vec![]).await, told(404, "sandbox_not_found"));
    assert_eq!(send("GET", "/v1/sandboxes/sb_x", None, vec![]).await, told(404, "sandbox_not_found"));
    assert_eq!(send("GET", "/v1/sandboxes?limit=0", None, vec![]).await, told(400, "invalid_query"));
    assert_eq!(send("GET", "/v1/sandboxes?cursor=zz", None, vec![]).await, told(400, "invalid_query"));
    assert_eq!(send("GET", "/v1/sandboxes?state=happy", None, vec![]).await, told(400, "invalid_query"));
    assert_eq!(send("GET", "/v1/sandboxes?limit=1&limit=2", None, vec![]).await, told(400, "invalid_query"));
    assert_eq!(
        send("POST", "/v1/sandboxes?wait=maybe", json, b"{}".to_vec()).await,
        told(400, "invalid_query")
    );
}

#[tokio::test]
async fn the_idempotency_key_may_come_in_the_header() {
    let host = Host::new().await;
    let id = host.sandbox().await;
    let send = async |body: Value| {
        let request = Request::post(format!("/v1/sandboxes/{id}/commands")).header("idempotency-key", "k");
        let request = request
            .header("authorization", format!("Bearer {}", host.key))
            .header("content-type", "application/json");
        host.raw(request.body(Body::from(body.to_string())).unwrap()).await
    };
    let first = send(json!({"argv": ["echo"]})).await;
    assert_eq!(first.json["request_id"], "k");
    assert_eq!(send(json!({"argv": ["echo"], "request_id": "k"})).await.json["id"], first.json["id"]);
    assert_eq!(send(json!({"argv": ["echo"], "request_id": "other"})).await.code(), "invalid_field");
}

#[tokio::test]
async fn the_document_describes_every_address_and_metrics_are_there() {
    let host = Host::new().await;
    host.sandbox().await;
    let document = host.get("/openapi.json").await.json;
    assert_eq!(document["info"]["title"], "Bivouac");
    assert!(document["components"]["schemas"]["CommandDocument"].is_object());
    assert!(document["components"]["schemas"]["ProblemDocument"].is_object());
    assert!(document["paths"]["/v1/sandboxes/{id}/commands/{command_id}/stream"]["get"].is_object());
    let metrics = String::from_utf8(host.get("/metrics").await.bytes).unwrap();
    assert!(metrics.contains("bivouac_sandboxes{state=\"running\"} 1"), "{metrics}");
    let templates = host.get("/v1/templates").await.json;
    assert_eq!(
        (templates["items"][0]["name"].as_str(), templates["items"][0]["memory_mib"].as_u64()),
        (Some("base"), Some(128))
    );
    assert_eq!(host.get("/v1/templates/base").await.json, templates["items"][0]);
    assert_eq!(host.get("/v1/templates/no").await.code(), "template_not_found");
}
