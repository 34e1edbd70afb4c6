//! What is wrong with a request is said, by name, and nothing comes of it.

use bivouac_tests::shared;
use serde_json::json;

#[test]
fn requests_that_make_no_sense_are_refused_by_name() {
    let client = shared().client();
    client.post("/v1/sandboxes", &json!({ "template": "no-such" })).expect_problem(404, "template_not_found");
    let unknown = client.post("/v1/sandboxes", &json!({ "template": "base", "memroy_mib": 64 }));
    let unknown = unknown.expect_problem(400, "unknown_field");
    assert!(unknown["detail"].as_str().unwrap().contains("memroy_mib"), "{unknown:#}");
    client
        .post("/v1/sandboxes", &json!({ "template": "base", "org": "other" }))
        .expect_problem(400, "unknown_field");
    client.post_raw("/v1/sandboxes", "{\"template\": ").expect_problem(400, "invalid_json");
    client
        .post("/v1/sandboxes", &json!({ "template": "base", "memory_mib": 1 }))
        .expect_problem(400, "invalid_field");
    client.get("/v1/nothing-here").expect_problem(404, "route_not_found");
    client.get("/v1/sandboxes/sb_nothing").expect_problem(404, "sandbox_not_found");
}

#[test]
fn keys_that_are_wrong_open_nothing() {
    let host = shared();
    let client = host.client();
    for key in ["", "nonsense", "biv_a_b", &format!("{}x", host.admin_key())] {
        client.with_key(key).get("/v1/sandboxes").expect_problem(401, "unauthorized");
    }
}

#[test]
fn commands_that_make_no_sense_are_refused_by_name() {
    let client = shared().client();
    let sandbox = client.create("base");
    let path = format!("/v1/sandboxes/{sandbox}/commands");
    for (body, code) in [
        (json!({ "argv": ["true"] }), "missing_field"),
        (json!({ "request_id": "a", "argv": [] }), "invalid_field"),
        (json!({ "request_id": "a", "argv": ["true"], "shell": "true" }), "invalid_field"),
        (json!({ "request_id": "a b", "argv": ["true"] }), "invalid_field"),
        (json!({ "request_id": "a", "argv": ["true"], "tiemout_ms": 1 }), "unknown_field"),
        (json!({ "request_id": "a", "argv": ["nul\u{0}byte"] }), "invalid_field"),
    ] {
        client.post(&path, &body).expect_problem(400, code);
    }
    assert_eq!(client.get(&path).expect(200)["items"], json!([]), "nothing was accepted");
    client.remove(&sandbox);
}

/// The document that clients are written from names what there is.
#[test]
fn the_openapi_document_names_every_address() {
    let document = shared().client().get("/openapi.json").expect(200);
    assert!(document["openapi"].as_str().is_some_and(|version| version.starts_with('3')));
    for path in [
        "/v1/sandboxes",
        "/v1/sandboxes/{id}",
        "/v1/sandboxes/{id}/commands",
        "/v1/sandboxes/{id}/files",
        "/v1/templates",
        "/v1/usage",
        "/v1/events",
        "/v1/health",
    ] {
        assert!(document["paths"].get(path).is_some(), "{path}");
    }
}
