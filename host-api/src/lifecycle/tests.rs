//! The lifecycle under random interleavings: late, duplicate and contradicting inputs in any order.

use super::*;
use proptest::prelude::*;

fn reason() -> Reason {
    Reason::new("monitor_killed", "killed by signal 9")
}

fn running(at: UnixMs) -> Record {
    step(&Record::accepted(0), &Input::Usable { at }).next
}

fn deleted_at(record: &Record, at: UnixMs) -> Step {
    step(record, &Input::Delete { at, reason: DeletionReason::Request })
}

#[test]
fn a_machine_that_becomes_usable_runs_and_is_metered_from_then_on() {
    let record = running(50);
    assert_eq!(record.state, State::Running);
    assert_eq!(record.metered_until(80), 30);
}

#[test]
fn delete_is_accepted_in_every_state() {
    for state in State::ALL {
        let record = Record { state, ..Record::accepted(0) };
        assert_eq!(deleted_at(&record, 9).next.deletion.map(|d| d.at), Some(9), "{state}");
    }
}

#[test]
fn a_late_create_result_after_a_delete_only_releases_its_work() {
    let deleting = deleted_at(&Record::accepted(0), 5).next;
    let late = step(&deleting, &Input::Usable { at: 9 });
    assert_eq!(late.next, deleting);
    assert_eq!(late.journal, []);
    assert_eq!(late.world, [World::Release(Scope::Everything)]);
}

#[test]
fn billing_ends_at_acceptance_however_late_the_release_is() {
    let deleting = deleted_at(&running(10), 110).next;
    let done = step(&deleting, &Input::Released { at: 9_000, scope: Scope::Everything });
    assert_eq!(done.next.metered_until(99_999), 100);
    assert_eq!(done.journal[0], Journal::UsageStopped { billing_ended_at: 110, released_at: 9_000 });
}

#[test]
fn a_second_delete_changes_nothing() {
    let deleting = deleted_at(&running(10), 20).next;
    let again = deleted_at(&deleting, 30);
    assert_eq!(again.next, deleting);
    assert_eq!((again.journal.len(), again.world.len()), (0, 0));
}

#[test]
fn a_machine_that_dies_is_failed_and_no_longer_metered() {
    let failed = step(&running(10), &Input::Died { at: 30, reason: reason() });
    assert_eq!(failed.next.state, State::Failed);
    assert_eq!(failed.next.metered_until(1_000), 20);
    assert_eq!(failed.journal[0], Journal::LoseCommands(LossReason::MachineDied));
    assert_eq!(failed.world, [World::Release(Scope::Machine)]);
}

#[test]
fn a_new_daemon_takes_up_each_state_as_it_was_left() {
    let accepted = Record::accepted(0);
    let failed = step(&running(1), &Input::Died { at: 2, reason: reason() }).next;
    let cases = [
        (accepted.clone(), vec![World::Recreate]),
        (running(1), vec![World::Adopt]),
        (failed, vec![World::Release(Scope::Machine)]),
        (deleted_at(&accepted, 3).next, vec![World::Release(Scope::Everything)]),
    ];
    for (record, world) in cases {
        assert_eq!(step(&record, &Input::TakenOver).world, world, "{}", record.state);
    }
}

fn inputs() -> impl Strategy<Value = Input> {
    let at = 0..10_000_i64;
    prop_oneof![
        at.clone().prop_map(|at| Input::Usable { at }),
        at.clone().prop_map(|at| Input::CouldNotStart { at, reason: reason() }),
        at.clone().prop_map(|at| Input::Died { at, reason: reason() }),
        at.clone().prop_map(|at| Input::Delete { at, reason: DeletionReason::Ttl }),
        at.clone().prop_map(|at| Input::Released { at, scope: Scope::Machine }),
        at.prop_map(|at| Input::Released { at, scope: Scope::Everything }),
        Just(Input::TakenOver),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn the_invariants_hold_in_any_order_of_inputs(steps in proptest::collection::vec(inputs(), 0..40)) {
        let mut record = Record::accepted(0);
        let mut stops = 0;
        let mut billed = None;
        for input in &steps {
            let before = record.clone();
            let done = step(&record, input);
            record = done.next;

            // An accepted delete is for ever, and keeps its first time and reason.
            if let Some(deletion) = before.deletion {
                prop_assert_eq!(record.deletion, Some(deletion));
                prop_assert!(matches!(record.state, State::Deleting | State::Deleted));
                prop_assert!(!done.world.iter().any(|w| matches!(w, World::Boot | World::Recreate | World::Adopt)));
            }
            // Metered exactly while running.
            prop_assert_eq!(record.metered_since.is_some(), record.state == State::Running);
            // What was billed at acceptance is what is billed for ever.
            if record.deletion.is_some() {
                let now = record.metered_until(i64::MAX);
                prop_assert_eq!(*billed.get_or_insert(now), now);
            }
            // Metering stops once, after the release, with the accepted time.
            for entry in &done.journal {
                if let Journal::UsageStopped { billing_ended_at, released_at } = entry {
                    stops += 1;
                    prop_assert_eq!(Some(*billing_ended_at), record.deletion.map(|d| d.at));
                    prop_assert_eq!(Some(*released_at), record.released_at);
                    prop_assert!(released_at >= billing_ended_at);
                }
            }
            prop_assert_eq!(record.released_at.is_some(), record.state == State::Deleted);
            prop_assert_eq!(record.failure.is_some(), record.failure.is_some() || before.failure.is_some());
            // Whatever leaves the states that own a machine releases it.
            if before.state != record.state && matches!(record.state, State::Failed | State::Deleting) {
                prop_assert!(done.world.iter().any(|w| matches!(w, World::Release(_))));
            }
        }
        prop_assert!(stops <= 1);
        prop_assert_eq!(stops == 1, record.state == State::Deleted);
    }
}
