//! Attacks that break a rule of a device: the machine ends, and its reason says which rule.

use crate::ground::Ground;

/// Runs the variants of an attack, which all end as a fault of `device`, by one of `rules`.
fn ends_by_rule(
    ground: &Ground,
    attack: &str,
    variants: impl IntoIterator<Item = u64>,
    device: &str,
    rules: &[&str],
) {
    let seeds = Vec::from_iter(variants);
    for (seed, reason) in seeds.iter().zip(ground.attacks(attack, seeds.clone(), None)) {
        let named = format!("the guest broke a rule of {device}: ");
        assert_eq!(reason.code, "device_fault", "{attack}, seed {seed}: {reason:?}");
        assert!(reason.detail.starts_with(&named), "{attack}, seed {seed}: {reason:?}");
        assert!(rules.iter().any(|rule| reason.detail.contains(rule)), "{attack}, seed {seed}: {reason:?}");
    }
}

#[test]
fn a_ring_that_lies_ends_its_own_machine_by_name() {
    let ground = Ground::new();
    ends_by_rule(&ground, "ring-index", 0..4, "block", &["index"]);
    let beyond = ["a ring entry names no descriptor", "a chain has no end, or leaves its table"];
    ends_by_rule(&ground, "ring-entry", 0..4, "block", &beyond);
}

#[test]
fn a_chain_without_end_ends_its_own_machine_by_name() {
    let ground = Ground::new();
    let endless = ["more segments than the device allows", "a chain has no end, or leaves its table"];
    ends_by_rule(&ground, "endless-chain", 0..4, "block", &endless);
    ends_by_rule(&ground, "looping-chain", 0..4, "block", &endless);
    ends_by_rule(&ground, "huge-length", 0..2, "block", &endless);
}

#[test]
fn a_table_or_a_request_that_is_none_ends_its_own_machine_by_name() {
    let ground = Ground::new();
    ends_by_rule(
        &ground,
        "indirect",
        0..8,
        "block",
        &["a chain has no end, or leaves its table", "a request"],
    );
    ends_by_rule(&ground, "outside", (0..12).step_by(5), "block", &["a request lies outside memory"]);
    ends_by_rule(&ground, "no-request", 0..6, "block", &["a request"]);
    ends_by_rule(&ground, "entropy", 0..5, "entropy", &["a request"]);
}

#[test]
fn queues_outside_memory_end_their_own_machine_by_name() {
    let ground = Ground::new();
    for (seeds, device) in [([0, 4, 48], "block"), ([2, 18, 50], "vsock"), ([3, 43, 51], "entropy")] {
        ends_by_rule(
            &ground,
            "placement",
            seeds,
            device,
            &["was not made ready, or does not lie in guest memory"],
        );
    }
}

#[test]
fn a_guest_that_loses_control_is_told_from_one_that_breaks_rules() {
    let ground = Ground::new();
    let reason = ground.attack("crash", 0, None);
    assert_eq!(reason.code, "guest_crashed", "{reason:?}");
    assert!(reason.detail.contains("triple fault"), "{reason:?}");
    // Code in a register, and where nothing is: KVM has nothing to run.
    for reason in ground.attacks("execute", 0..4, None) {
        assert!(["device_fault", "guest_crashed"].contains(&reason.code.as_ref()), "{reason:?}");
        assert!(reason.detail.contains("processor 0"), "{reason:?}");
    }
}
