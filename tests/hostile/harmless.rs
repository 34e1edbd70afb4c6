//! Attacks that break nothing: the guest gets through all of what it tries, and resets its machine.

use crate::ground::{Ground, times};
use std::time::Duration;

/// Rounds as the attack has them, or for longer.
fn gets_through(ground: &Ground, attack: &str, seed: u64, count: u64) {
    let reason = ground.attack(attack, seed, Some(count * times()));
    assert_eq!(reason.code, "guest_shutdown", "{attack}, seed {seed}: {reason:?}");
}

#[test]
fn registers_of_any_width_in_any_state_do_nothing_they_should_not() {
    let ground = Ground::new();
    gets_through(&ground, "registers", 1, 1500);
    gets_through(&ground, "live-registers", 2, 3000);
    gets_through(&ground, "notify", 3, 600);
}

#[test]
fn ports_addresses_and_calls_that_lead_nowhere_do_nothing() {
    let ground = Ground::new();
    // Those of the devices a PC has, and with time enough all 65536.
    gets_through(&ground, "ports", 0, 8192);
    gets_through(&ground, "gap", 2, 1500);
    gets_through(&ground, "hypercalls", 3, 1000);
}

#[test]
fn an_interrupt_storm_is_the_guests_own_affair() {
    gets_through(&Ground::new(), "storm", 1, 200);
}

#[test]
fn a_device_reset_in_the_middle_of_its_requests_works_again() {
    gets_through(&Ground::new(), "reset", 1, 100);
}

#[test]
fn requests_for_what_is_not_there_are_errors_for_the_guest() {
    let ground = Ground::new();
    gets_through(&ground, "outside-data", 0, 300);
    gets_through(&ground, "outside-data", 1, 300);
}

/// The rings are the host kernel's: it stops at what it cannot read, and no other guest's connections suffer.
#[test]
fn rings_of_noise_for_the_socket_device_harm_nobody() {
    gets_through(&Ground::new(), "vsock-lies", 1, 50);
}

/// What is read twice could be good the first time and bad the second.
#[test]
fn requests_that_change_while_they_are_served_are_served_as_they_were_or_end_the_machine() {
    end_by_name_or_do_nothing("rewrite", 2, 200, "the guest broke a rule of block: ");
}

#[test]
fn noise_everywhere_ends_the_machine_by_name_or_does_nothing() {
    end_by_name_or_do_nothing("chaos", 8, 40, "the guest broke a rule of ");
}

fn end_by_name_or_do_nothing(attack: &str, seeds: u64, count: u64, name: &str) {
    let ground = Ground::new();
    for round in 0..times() {
        let seeds = seeds * round..seeds * (round + 1);
        for (seed, reason) in seeds.clone().zip(ground.attacks(attack, seeds, Some(count))) {
            let named = reason.code == "device_fault" && reason.detail.starts_with(name);
            assert!(reason.code == "guest_shutdown" || named, "seed {seed}: {reason:?}");
        }
    }
}

#[test]
fn every_attack_that_a_machine_survives_in_any_order() {
    gets_through(&Ground::new(), "mix", 1, 25);
}

/// Nor from being saved; and its clone is as busy.
#[test]
fn a_device_that_is_never_idle_keeps_nobody_from_being_heard() {
    let length = Duration::from_secs(2 * times());
    Ground::new().endless_attack("flood", 1, length);
}
