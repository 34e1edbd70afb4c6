//! Snapshots that are not what they were: refused with a reason that can be acted on, before anything of them runs.

use crate::world::{SMALL, World};
use bivouac_vmm::snapshot::{MachineState, decode, encode};
use bivouacd::machine::SavedMachine;
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
    sync::Arc,
};

const MIB: u64 = 1 << 20;

/// What is done to a saved machine's folder.
type Damage = fn(&Path);

#[test]
fn a_snapshot_that_was_damaged_or_is_another_hosts_is_refused_and_never_runs() {
    let world = World::new();
    let good = world.boot(SMALL).save("good");
    let cases: [(&str, Damage, &str); 11] = [
        ("a flipped bit of state", |f| flip(&f.join("state"), 5000), "checksum"),
        ("a flipped bit in the header", |f| flip(&f.join("state"), 12), "checksum"),
        ("a flipped bit of memory", |f| flip(&f.join("memory"), 7 * MIB + 4321), "MiB 7"),
        ("a short state", |f| shorten(&f.join("state"), 1), "incomplete"),
        (
            "an empty state",
            |f| File::options().write(true).open(f.join("state")).unwrap().set_len(0).unwrap(),
            "shorter",
        ),
        ("a long state", |f| append(&f.join("state")), "damaged"),
        ("a short memory", |f| shorten(&f.join("memory"), 1), "instead of"),
        ("a long memory", |f| append(&f.join("memory")), "instead of"),
        ("another version", |f| write(&f.join("state"), 8, 99), "version 99"),
        ("another vendor", |f| change(f, |s| leaf(s, 0).ebx ^= 1), "another vendor"),
        ("a feature that this host lacks", |f| change(f, |s| leaf(s, 7).ecx = u32::MAX), "lacks a feature"),
    ];
    for (name, damage, why) in cases {
        let folder = copy(&world, &good, name);
        damage(&folder);
        let (detail, log) = refused(&world, &folder);
        assert!(detail.contains(why), "{name}: {detail}");
        assert!(log.contains(why), "{name}: {log}");
    }
    // Another model is another processor, too; and a number of processors that none has.
    for (name, damage, why) in [
        ("another model", (|f| change(f, |s| leaf(s, 1).eax ^= 0x10)) as Damage, "another model"),
        ("no processors", |f| change(f, |s| s.vcpus.clear()), "0 processors"),
        ("a device less", |f| change(f, |s| drop(s.devices.pop())), "device"),
    ] {
        let folder = copy(&world, &good, name);
        damage(&folder);
        let (detail, _) = refused(&world, &folder);
        assert!(detail.contains(why), "{name}: {detail}");
    }
    // The original was only ever read.
    assert_eq!(world.clone_of(&good, SMALL).shell("echo well"), "well\n");
}

#[test]
fn a_snapshot_with_a_file_missing_is_refused_by_its_name() {
    let world = World::new();
    let good = world.boot(SMALL).save("good");
    for file in ["state", "memory", "disk.img"] {
        let folder = copy(&world, &good, &format!("without {file}"));
        let path = folder.join(file);
        fs::remove_file(&path).unwrap();
        let spec = world.spec(SMALL, Some(SavedMachine { folder, verify: true, record: false }));
        let Err(refused) = world.launch(&spec) else { panic!("{file} is missing, and it starts") };
        assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
    }
}

/// Launches it; returns why it ended, and what the monitor logged.
fn refused(world: &Arc<World>, folder: &Path) -> (String, String) {
    let spec =
        world.spec(SMALL, Some(SavedMachine { folder: folder.to_owned(), verify: true, record: false }));
    let mut guest = world.launch(&spec).unwrap();
    let reason = guest.ended();
    assert_eq!(reason.code, "boot_failed", "{folder:?}: {reason:?}");
    assert_eq!(guest.machine.booted(), None, "no processor ever ran");
    (reason.detail, guest.log())
}

fn copy(world: &World, from: &Path, name: &str) -> std::path::PathBuf {
    let to = world.path(name);
    fs::create_dir(&to).unwrap();
    for file in ["state", "memory", "disk.img"] {
        fs::copy(from.join(file), to.join(file)).unwrap();
    }
    to
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

fn flip(path: &Path, at: u64) {
    let file = open(path);
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

fn write(path: &Path, at: u64, byte: u8) {
    open(path).write_all_at(&[byte], at).unwrap();
}

fn shorten(path: &Path, by: u64) {
    let file = open(path);
    file.set_len(file.metadata().unwrap().len() - by).unwrap();
}

fn append(path: &Path) {
    write(path, fs::metadata(path).unwrap().len(), 0);
}

/// Writes the state anew, changed, with a header that vouches for it.
fn change(folder: &Path, change: impl FnOnce(&mut MachineState)) {
    let path = folder.join("state");
    let mut state = decode(&fs::read(&path).unwrap()).unwrap();
    change(&mut state);
    fs::write(&path, encode(&state).unwrap()).unwrap();
}

fn leaf(state: &mut MachineState, function: u32) -> &mut kvm_bindings::kvm_cpuid_entry2 {
    state.vcpus[0].cpuid.iter_mut().find(|leaf| (leaf.function, leaf.index) == (function, 0)).unwrap()
}
