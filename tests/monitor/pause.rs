//! Pausing, going on, and writing out in between.

use crate::{
    process,
    world::{Guest, Running, SMALL, World},
};
use bivouac_protocol::monitor::{FromMonitor, State, ToMonitor};
use std::{fs::File, os::fd::OwnedFd, time::Duration};

/// A command that counts aloud, for as long as it is let.
pub fn counting(guest: &Guest) -> Running {
    guest.start("n=0; while :; do n=$((n+1)); echo $n; sleep 0.02; done")
}

/// Takes lines up to the one after `last`, each of which is one more than the one before; returns the last.
pub fn counts_on(running: &mut Running, last: u64, lines: u64) -> u64 {
    (0..lines).fold(last, |last, _| {
        let line: u64 = running.line().parse().unwrap();
        assert_eq!(line, last + 1, "nothing is lost and nothing comes twice");
        line
    })
}

fn state(guest: &Guest) -> (State, u64) {
    match guest.ask(ToMonitor::Status).unwrap() {
        FromMonitor::Status { state, exits } => (state, exits),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_paused_guest_stands_still_and_goes_on_where_it_stopped() {
    let world = World::new();
    let guest = world.boot(SMALL);
    // One that talks, and one that is never idle.
    let mut talking = counting(&guest);
    let _busy = guest.start("while :; do :; done");
    let said = counts_on(&mut talking, 0, 3);
    let pid = guest.pid();
    let vcpu = process::thread(pid, "vcpu").tid;
    let memory = process::mappings(pid)[0];
    assert!(memory.len() >= 64 << 20, "{memory:?}");

    assert_eq!(guest.ask(ToMonitor::Pause).unwrap(), FromMonitor::Paused);
    let look = || (state(&guest), process::ticks(pid, vcpu), process::contents(pid, memory));
    let before = look();
    assert_eq!(before.0.0, State::Paused);
    std::thread::sleep(Duration::from_millis(300));
    let after = look();
    assert_eq!((before.0, before.1), (after.0, after.1));
    assert!(before.2 == after.2, "not a byte of guest memory changes");

    assert_eq!(guest.ask(ToMonitor::Resume).unwrap(), FromMonitor::Resumed);
    counts_on(&mut talking, said, 5);
    assert_eq!(state(&guest).0, State::Running);
    assert!(before.2 != process::contents(pid, memory));
    assert_eq!(guest.shell("echo connected anew"), "connected anew\n");
}

#[test]
fn pausing_and_resuming_twice_is_harmless() {
    let world = World::new();
    let guest = world.boot(SMALL);
    let mut talking = counting(&guest);
    let mut said = 0;
    for _ in 0..3 {
        said = counts_on(&mut talking, said, 2);
        for _ in 0..2 {
            assert_eq!(guest.ask(ToMonitor::Pause).unwrap(), FromMonitor::Paused);
            assert_eq!(state(&guest).0, State::Paused);
        }
        for _ in 0..2 {
            assert_eq!(guest.ask(ToMonitor::Resume).unwrap(), FromMonitor::Resumed);
            assert_eq!(state(&guest).0, State::Running);
        }
    }
    counts_on(&mut talking, said, 2);
}

/// Two files for a snapshot; what is written in them is there before.
fn files(state: &[u8], memory: &[u8]) -> [File; 2] {
    use std::os::unix::fs::FileExt;
    [state, memory].map(|held| {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(held, 0).unwrap();
        file
    })
}

fn snapshot(guest: &Guest, files: &[File]) -> Result<FromMonitor, String> {
    let files = files.iter().map(|file| OwnedFd::from(file.try_clone().unwrap())).collect();
    guest.ask_with(ToMonitor::Snapshot, files).map_err(|e| e.to_string())
}

#[test]
fn a_snapshot_is_refused_unless_the_machine_is_paused_and_the_files_are_two_and_empty() {
    let world = World::new();
    let guest = world.boot(SMALL);
    let mut talking = counting(&guest);
    let refused = snapshot(&guest, &files(b"", b"")).unwrap_err();
    assert!(refused.contains("not paused"), "{refused}");
    let said = counts_on(&mut talking, 0, 2);

    guest.ask(ToMonitor::Pause).unwrap();
    for (given, why) in [
        (files(b"mine", b"").to_vec_of(2), "state file is not empty"),
        (files(b"", b"mine").to_vec_of(2), "memory file is not empty"),
        (files(b"", b"").to_vec_of(1), "two files"),
        (files(b"", b"").to_vec_of(0), "two files"),
    ] {
        let refused = snapshot(&guest, &given).unwrap_err();
        assert!(refused.contains(why), "{refused}");
    }
    let mine = files(b"", b"mine");
    snapshot(&guest, &mine).unwrap_err();
    assert_eq!(std::io::read_to_string(&mine[1]).unwrap(), "mine", "and is left as it was");
    assert_eq!(state(&guest).0, State::Paused);

    // None of it did any harm.
    assert_eq!(snapshot(&guest, &files(b"", b"")).unwrap(), FromMonitor::Snapshotted);
    guest.ask(ToMonitor::Resume).unwrap();
    counts_on(&mut talking, said, 2);
}

trait Few {
    fn to_vec_of(self, count: usize) -> Vec<File>;
}

impl Few for [File; 2] {
    fn to_vec_of(self, count: usize) -> Vec<File> {
        self.into_iter().take(count).collect()
    }
}
