//! What a clone touches up to the end of its first command is learned from one, and mapped ahead for the others.

use crate::world::{Guest, SMALL, World, alone};
use bivouacd::machine::SavedMachine;
use std::{fs, path::Path, process::Command};

const KVM: &str = "/sys/kernel/debug/kvm";

/// How often KVM was stopped by a page that was not mapped: its own count for this machine.
fn faults(guest: &Guest) -> u64 {
    let own = format!("{}-", guest.pid());
    let mut folders = fs::read_dir(KVM).unwrap().map(|entry| entry.unwrap());
    let folder = folders.find(|entry| entry.file_name().to_string_lossy().starts_with(&own)).unwrap();
    fs::read_to_string(folder.path().join("pf_taken")).unwrap().trim().parse().unwrap()
}

/// Whether this host can map ahead (`KVM_PRE_FAULT_MEMORY`, Linux 6.11).
fn can_map_ahead() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(11))
}

#[test]
fn a_clone_whose_like_was_watched_is_spared_most_of_its_page_faults() {
    let _alone = alone();
    if !Path::new(KVM).is_dir() {
        // Nobody needs it but this test; a second mount elsewhere would do as well.
        let mounted = Command::new("mount").args(["-t", "debugfs", "none", "/sys/kernel/debug"]).status();
        assert!(mounted.unwrap().success(), "KVM's counters cannot be read");
    }
    let world = World::new();
    let folder = {
        let guest = world.boot(SMALL);
        guest.shell("true");
        guest.save("saved")
    };
    let saved = SavedMachine { folder: folder.clone(), verify: false, record: false };
    let first_command = |saved: SavedMachine| {
        let clone = world.clone_from(saved, SMALL);
        clone.shell("true");
        (faults(&clone), clone)
    };

    let (before, _) = first_command(saved.clone());
    let watched = SavedMachine { record: true, ..saved.clone() };
    watched.forget().unwrap();
    let (_, clone) = first_command(watched.clone());
    let pages = watched.learn(clone.pid()).unwrap();
    drop(clone);
    let all = fs::metadata(folder.join("memory")).unwrap().len() / 4096;
    assert!((100..all / 2).contains(&(pages as u64)), "{pages} of {all} pages");

    let (after, clone) = first_command(saved);
    println!("{before} page faults, {after} with {pages} pages mapped ahead");
    assert_eq!(clone.shell("echo well"), "well\n");
    if can_map_ahead() {
        assert!(after * 2 < before, "{after} page faults where {before} were taken before");
    }
}
