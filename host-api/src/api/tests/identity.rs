//! Keys and organizations.

use super::harness::Host;
use axum::body::Body;
use axum::http::Request;
use serde_json::json;

#[tokio::test]
async fn without_a_valid_key_there_is_nothing_but_health() {
    let host = Host::new().await;
    for key in ["", "biv_x", "biv_0000000000000000_00"] {
        let refused = host.send(key, "GET", "/v1/sandboxes", None).await;
        assert_eq!((refused.status.as_u16(), refused.code()), (401, "unauthorized"));
        assert_eq!(refused.headers["www-authenticate"], "Bearer");
    }
    let health = host.raw(Request::get("/v1/health").body(Body::empty()).unwrap()).await;
    assert_eq!((health.status.as_u16(), health.json["status"].as_str()), (200, Some("ok")));
}

/// Walks the OpenAPI document: whatever address is added later is tested too.
#[tokio::test]
async fn another_organization_s_sandbox_is_not_found_anywhere() {
    let host = Host::new().await;
    let foreign = host.foreign_key().await;
    let id = host.sandbox().await;
    let command = host.run(&id, json!({"request_id": "a", "argv": ["echo"]})).await.json["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let document = host.get("/openapi.json").await.json;
    let mut tried = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        if !path.contains("{id}") {
            continue;
        }
        for method in methods.as_object().unwrap().keys() {
            let body = match path.rsplit('/').next().unwrap() {
                "commands" if method == "post" => Some(json!({"request_id": "z", "argv": ["echo"]})),
                "signal" => Some(json!({"signal": 15})),
                _ => None,
            };
            let mut answers = Vec::new();
            for sandbox in [&id, "sb_01arz3ndektsv4rrffq69g5fav"] {
                let mut path = path.replace("{id}", sandbox).replace("{command_id}", &command);
                path.extend(path.ends_with("files").then_some("?path=/x"));
                let answer = host.send(&foreign, &method.to_uppercase(), &path, body.clone()).await;
                assert_eq!(
                    (answer.status.as_u16(), answer.code()),
                    (404, "sandbox_not_found"),
                    "{method} {path}"
                );
                answers.push(answer.json["detail"].as_str().unwrap().replace(sandbox, "X"));
            }
            assert_eq!(answers[0], answers[1], "the two are told apart at {method} {path}");
            tried += 1;
        }
    }
    assert!(tried >= 12, "{tried}");
    assert!(
        host.send(&foreign, "GET", "/v1/sandboxes", None).await.json["items"].as_array().unwrap().is_empty()
    );
    let usage = host.send(&foreign, "GET", &format!("/v1/usage?sandbox_id={id}"), None).await;
    assert_eq!(usage.code(), "sandbox_not_found");
    let events = host.send(&foreign, "GET", &format!("/v1/events?sandbox_id={id}"), None).await;
    assert!(events.json["items"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn an_organization_named_in_a_request_is_refused() {
    let host = Host::new().await;
    for field in ["org", "organization", "organization_id"] {
        let refused = host.post("/v1/sandboxes", json!({"template": "base", field: "other"})).await;
        assert_eq!((refused.status.as_u16(), refused.code()), (400, "unknown_field"));
        assert!(refused.json["detail"].as_str().unwrap().contains(field));
    }
    let request = Request::get("/v1/sandboxes").header("authorization", format!("Bearer {}", host.key));
    let refused = host.raw(request.header("X-Organization", "other").body(Body::empty()).unwrap()).await;
    assert_eq!(refused.code(), "unknown_field");
    assert_eq!(host.get("/v1/sandboxes?org=other").await.code(), "invalid_query");
}
