//! Machines of every size: processors that are all there and all work, memory that is all there, above 4 GiB too.

use crate::world::{Guest, SMALL, Shape, World, alone};

/// Each processor is there, and runs what is put on it.
fn assert_processors(guest: &Guest, count: u32) {
    let found = guest.shell("nproc; grep -c ^processor /proc/cpuinfo; cat /sys/devices/system/cpu/online");
    let online = if count == 1 { "0".to_owned() } else { format!("0-{}", count - 1) };
    assert_eq!(found, format!("{count}\n{count}\n{online}\n"));
    // Field 39 of a process's `stat` is the processor that it runs on.
    let last = count - 1;
    let ran = guest.shell(&format!(
        "for cpu in $(seq 0 {last}); do
           taskset -c $cpu sh -c 'n=0; while [ $n -lt 2000 ]; do n=$((n+1)); done; cut -d\" \" -f39 /proc/$$/stat' &
         done | sort -n; wait"
    ));
    let all: Vec<String> = (0..count).map(|cpu| cpu.to_string()).collect();
    assert_eq!(ran.lines().collect::<Vec<_>>(), all);
}

fn processors(vcpus: u8) {
    let world = World::new();
    let guest = world.boot(Shape { vcpus, memory_mib: 128, ..SMALL });
    assert_processors(&guest, vcpus.into());
}

#[test]
fn one_processor_works() {
    processors(1);
}

#[test]
fn two_processors_work_and_those_of_a_clone_do() {
    let shape = Shape { vcpus: 2, ..SMALL };
    let world = World::new();
    let guest = world.boot(shape);
    assert_processors(&guest, 2);
    let busy = "while :; do :; done";
    let _busy = [guest.start(busy), guest.start(busy)];
    let folder = guest.save("saved");
    assert_processors(&guest, 2);
    for _ in 0..2 {
        assert_processors(&world.clone_of(&folder, shape), 2);
    }
}

#[test]
fn four_processors_work() {
    processors(4);
}

#[test]
fn eight_processors_work() {
    let _alone = alone();
    processors(8);
}

/// MemTotal is what is left when the kernel has taken its own share: for each page a descriptor of 64 bytes, and itself.
fn assert_memory(guest: &Guest, mib: u64) {
    let kib: u64 = guest.shell("awk '/^MemTotal:/ { print $2 }' /proc/meminfo").trim().parse().unwrap();
    let least = mib * 1024 * 63 / 64 - (24 << 10);
    assert!((least..mib * 1024).contains(&kib), "{kib} KiB of {mib} MiB");
}

#[test]
fn memory_is_what_was_asked_for() {
    for memory_mib in [64, 1024] {
        let world = World::new();
        let guest = world.boot(Shape { memory_mib, ..SMALL });
        assert_memory(&guest, memory_mib.into());
    }
}

/// Two regions, the second above 4 GiB: filled, saved, and found as it was in a clone.
#[test]
fn memory_above_four_gib_works_and_is_saved() {
    const HIGH_MIB: u64 = 512;
    let _alone = alone();
    let shape = Shape { memory_mib: 3072 + HIGH_MIB as u32, ..SMALL };
    let world = World::new();
    let guest = world.boot(shape);
    assert_memory(&guest, 3072 + HIGH_MIB);
    let physical = guest.shell("grep 'System RAM' /proc/iomem");
    assert!(physical.contains("100000000-11fffffff"), "{physical}");

    // More than the second region holds, and the kernel fills that one first.
    // In MiB, of which each has 256 pages.
    let free = |guest: &Guest| -> u64 {
        let script =
            "awk '/zone / { zone = $4 } /nr_free_pages/ && zone == \"Normal\" { print $2 }' /proc/zoneinfo";
        guest.shell(script).trim().parse::<u64>().unwrap() / 256
    };
    let before = free(&guest);
    let sum = guest.shell(
        "dd if=/dev/urandom of=/dev/shm/block bs=1M count=8 2>/dev/null
         for n in $(seq 1 75); do cat /dev/shm/block; done > /dev/shm/many; md5sum < /dev/shm/many",
    );
    let after = free(&guest);
    assert!(
        before > HIGH_MIB / 2 && after < HIGH_MIB / 4,
        "free above 4 GiB: {before} MiB, then {after} MiB"
    );

    let folder = guest.save("saved");
    drop(guest);
    let clone = world.clone_of(&folder, shape);
    assert_memory(&clone, 3072 + HIGH_MIB);
    assert_eq!(clone.shell("md5sum < /dev/shm/many"), sum);
}
