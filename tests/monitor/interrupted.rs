//! A save that breaks off in the middle: the monitor dies, or whoever asked for it. Where the middle is, is decided by
//! the monitor's own system calls, which it is held at.

use crate::{
    pause::{counting, counts_on},
    process,
    trace::Traced,
    world::{self, SMALL, World, wait},
};
use bivouac_protocol::monitor::{FromMonitor, State, ToMonitor};
use bivouacd::{ids::SandboxId, machine::Machines};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Pieces of memory that are written before the end comes.
const PIECES: u32 = 3;

/// The saver's orders, in its environment: the folders' parent, the instance, the sandbox, where to save.
const SAVER: &str = "BIVOUAC_TEST_SAVER";

#[test]
fn a_monitor_killed_while_it_writes_leaves_no_snapshot() {
    let world = World::new();
    let folder = world.path("saved");
    let mut guest = world.boot(SMALL);
    let pid = guest.pid();
    let control = Traced::stop(process::thread(pid, "control").tid);
    let saved = std::thread::scope(|scope| {
        let saving = scope
            .spawn(|| wait("a save breaks off", world.machines.save(&guest.id, &guest.machine, &folder)));
        control.run_until(libc::SYS_pwrite64, PIECES);
        assert!(!folder.exists());
        kill(pid);
        saving.join().unwrap()
    });
    let refused = saved.unwrap_err().to_string();
    assert!(refused.contains("the monitor is gone"), "{refused}");
    assert!(!folder.exists());
    assert_eq!(guest.ended().code, "monitor_killed");
    drop(control);
    drop(guest);

    // The name is free.
    let folder = world.boot(SMALL).save("saved");
    assert_eq!(world.clone_of(&folder, SMALL).shell("echo well"), "well\n");
}

#[test]
fn a_daemon_killed_while_it_saves_leaves_no_snapshot_and_its_machine_goes_on() {
    let world = World::new();
    let folder = world.path("saved");
    let mut guest = world.boot(SMALL);
    let mut talking = counting(&guest);
    let said = counts_on(&mut talking, 0, 3);
    let control = Traced::stop(process::thread(guest.pid(), "control").tid);
    let data = world.data();
    let orders = [
        data.parent().unwrap().to_str().unwrap(),
        &world.instance,
        guest.id.as_str(),
        folder.to_str().unwrap(),
    ];
    let mut saver = Command::new("/proc/self/exe")
        .args(["interrupted::saver", "--exact"])
        .env(SAVER, orders.join("\n"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    control.run_until(libc::SYS_pwrite64, PIECES);
    saver.kill().unwrap();
    saver.wait().unwrap();
    drop(control);

    let partial = folder.with_extension("partial");
    assert!(partial.join("memory").exists() && !folder.exists());
    // A daemon that comes after it finds the machine paused, since nobody told it to go on, and takes it up.
    guest.machine = wait("a machine is found", world.machines.find(&guest.id)).unwrap().expect("it lives");
    match guest.ask(ToMonitor::Status).unwrap() {
        FromMonitor::Status { state, .. } => assert_eq!(state, State::Running),
        other => panic!("{other:?}"),
    }
    let said = counts_on(&mut talking, said, 3);

    assert_eq!(guest.save("saved"), folder);
    assert!(folder.exists() && !partial.exists());
    counts_on(&mut talking, said, 3);
    assert_eq!(world.clone_of(&folder, SMALL).shell("echo well"), "well\n");
}

#[test]
fn a_machine_that_was_left_paused_goes_on_when_it_is_taken_up() {
    let world = World::new();
    let mut guest = world.boot(SMALL);
    let mut talking = counting(&guest);
    let said = counts_on(&mut talking, 0, 3);
    assert_eq!(guest.ask(ToMonitor::Pause).unwrap(), FromMonitor::Paused);
    guest.machine = wait("a machine is found", world.machines.find(&guest.id)).unwrap().expect("it lives");
    counts_on(&mut talking, said, 3);
    assert_eq!(guest.shell("echo well"), "well\n");
}

/// Not a test of its own: the process that a test above starts, and kills.
#[test]
fn saver() {
    let Ok(orders) = std::env::var(SAVER) else { return };
    let orders: Vec<&str> = orders.lines().collect();
    let [folder, instance, id, saved] = orders[..] else { panic!("{orders:?}") };
    let (id, saved) = (SandboxId::parse(id).unwrap(), PathBuf::from(saved));
    wait("being killed", async {
        let machines = world::machines(Path::new(folder), instance);
        let machine = machines.find(&id).await.unwrap().expect("it lives");
        machines.save(&id, &machine, &saved).await
    })
    .unwrap();
}

fn kill(pid: i32) {
    // SAFETY: a signal to a process that this test started.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
}
