//! Saved machines taken up again: each clone is a sandbox of its own, and what it was made from goes on.

use crate::{
    disk::holds,
    pause::{counting, counts_on},
    world::{Guest, SMALL, Shape, World, alone, now, runtime, wait},
};
use std::{collections::BTreeSet, fs, time::Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener, VsockStream};

const PYTHON: Shape = Shape { template: "python", vcpus: 1, memory_mib: 128 };

/// Counts in a file.
const COUNT: &str = "while :; do echo >> /run/count; sleep 1; done";
/// The same, slowly enough that a hundred of them leave an emulated host time for other things.
const COUNT_SLOWLY: &str = "while :; do echo >> /run/count; sleep 10; done";

fn count(guest: &Guest) -> u64 {
    guest.shell("wc -l < /run/count").trim().parse().unwrap()
}

/// Waits until the process of before has counted on from `before`.
fn counts_past(guest: &Guest, before: u64) {
    guest.shell(&format!("until [ $(wc -l < /run/count) -gt {before} ]; do sleep 0.1; done"));
}

/// Within a second of the host's, but for the time that the host's word took to arrive: on a host with more guests than it
/// has time for, that may be seconds.
fn assert_right_time(guest: &Guest) {
    let earliest = (now() - guest.configured_in).as_secs();
    let found: u64 = guest.shell("date +%s").trim().parse().unwrap();
    let latest = now().as_secs();
    assert!((earliest - 1..=latest + 1).contains(&found), "{found} is not in {earliest}..={latest}");
}

#[test]
fn a_machine_that_was_saved_goes_on_with_its_connections() {
    let world = World::new();
    let guest = world.boot(SMALL);
    let mut talking = counting(&guest);
    let said = counts_on(&mut talking, 0, 3);
    guest.save("first");
    let said = counts_on(&mut talking, said, 3);
    guest.save("second");
    counts_on(&mut talking, said, 3);
    assert_eq!(guest.shell("echo well"), "well\n");
    assert_right_time(&guest);
    for name in ["first", "second"] {
        let mut held: Vec<_> =
            fs::read_dir(world.path(name)).unwrap().map(|e| e.unwrap().file_name()).collect();
        held.sort();
        assert_eq!(held, ["disk.img", "memory", "state"]);
    }
}

#[test]
fn a_clone_is_a_sandbox_of_its_own_in_which_processes_go_on() {
    let world = World::new();
    let guest = world.boot(SMALL);
    let mut talking = counting(&guest);
    let _counting = guest.start(COUNT);
    let said = counts_on(&mut talking, 0, 3);
    counts_past(&guest, 0);
    guest.shell("echo of both > /root/before");
    let folder = guest.save("saved");

    let (one, other) = (world.clone_of(&folder, SMALL), world.clone_of(&folder, SMALL));
    for clone in [&one, &other] {
        assert_ne!(clone.cid, guest.cid);
        assert_eq!(clone.shell("hostname").trim(), clone.hostname());
        assert_right_time(clone);
        counts_past(clone, count(clone));
        // The command goes on too, with all that it ever said.
        let mut talking = clone.attach(&talking.id);
        counts_on(&mut talking, 0, said + 20);
    }
    // The first one has kept its name, its connections and its processes.
    assert_eq!(guest.shell("hostname").trim(), guest.hostname());
    counts_on(&mut talking, said, 20);
    counts_past(&guest, count(&guest));

    one.shell("a=only-in; echo $a-one > /root/mine; sync");
    other.shell("a=only-in; echo $a-other > /root/mine; sync");
    for (clone, own, others) in
        [(&one, "only-in-one", "only-in-other"), (&other, "only-in-other", "only-in-one")]
    {
        assert_eq!(clone.shell("cat /root/before /root/mine"), format!("of both\n{own}\n"));
        let disk = clone.folder().join("scratch.img");
        assert!(holds(&disk, own.as_bytes()) && !holds(&disk, others.as_bytes()));
    }
    assert_eq!(guest.shell("ls /root"), "before\n");
    assert!(!holds(&folder.join("disk.img"), b"only-in-"), "what was saved is never written again");
}

/// Holds a connection to the host, gives back what it hears, and says in files what became of it.
const HOLDER: &str = r#"
import os, random, socket, sys, time
def tell(name, text):
    with open("/run/new", "w") as file: file.write(text)
    os.rename("/run/new", "/run/" + name)
held = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
held.connect((2, int(sys.argv[1])))
while True:
    try: heard = held.recv(100)
    except OSError as e: heard = b""; tell("error", str(e))
    if not heard: break
    held.sendall(heard)
tell("cut", "")
while not os.path.exists("/run/go"): time.sleep(0.05)
with open("/dev/urandom", "rb", buffering=0) as file: read = file.read(16)
tell("random", f"{read.hex()} {os.getrandom(16).hex()} {random.SystemRandom().getrandbits(128):032x}")
"#;

/// A process of before, too: it loses its connection, and has other random numbers than its like in another clone.
#[test]
fn connections_of_before_are_cut_in_a_clone_and_random_numbers_are_its_own() {
    let world = World::new();
    let guest = world.boot(PYTHON);
    let listener =
        runtime().block_on(async { VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, u32::MAX)) }).unwrap();
    let port = listener.local_addr().unwrap().port();
    let _holder = guest
        .start(&format!("cat > /run/holder.py <<'END'\n{HOLDER}\nEND\nexec python3 /run/holder.py {port}"));
    let (mut held, peer) = wait("the guest's connection", listener.accept()).unwrap();
    assert_eq!(peer.cid(), guest.cid);
    echoes(&mut held);
    let folder = guest.save("saved");
    echoes(&mut held);

    let clones: Vec<Guest> = (0..4).map(|_| world.clone_of(&folder, PYTHON)).collect();
    let mut seen = BTreeSet::new();
    for clone in &clones {
        clone.shell("until [ -e /run/cut ]; do sleep 0.05; done; touch /run/go");
        // A new process, and one of before.
        let new =
            "import os, random; print(os.urandom(16).hex(), os.getrandom(16).hex(), random.getrandbits(128))";
        let new = clone.shell(&format!("python3 -c '{new}'"));
        let old = clone.shell("until [ -e /run/random ]; do sleep 0.05; done; cat /run/random");
        seen.extend(new.split_whitespace().chain(old.split_whitespace()).map(str::to_owned));
        assert_right_time(clone);
    }
    assert_eq!(seen.len(), clones.len() * 6, "{seen:?}");
    // The machine that they were made from has noticed nothing.
    echoes(&mut held);
    assert_eq!(guest.shell("ls /run/cut /run/error 2>/dev/null || true"), "");
}

fn echoes(held: &mut VsockStream) {
    wait("an echo", async {
        held.write_all(b"echo").await.unwrap();
        let mut heard = [0; 4];
        held.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"echo");
    });
}

/// All of one snapshot, at once. How many: `BIVOUAC_CLONES`.
#[test]
fn many_clones_of_one_machine_run_together_each_its_own() {
    let _alone = alone();
    let wanted = std::env::var("BIVOUAC_CLONES").ok().map_or(25, |number| number.parse().unwrap());
    let world = World::new();
    let folder = {
        let guest = world.boot(SMALL);
        let _counting = guest.start(COUNT_SLOWLY);
        counts_past(&guest, 0);
        guest.save("saved")
    };
    let (begun, free) = (Instant::now(), available_kib());
    let mut seen = BTreeSet::new();
    let mut clones = Vec::new();
    for _ in 0..wanted {
        let clone = world.clone_of(&folder, SMALL);
        let told = clone.shell(
            "hostname; head -c 16 /dev/urandom | xxd -p; cat /proc/sys/kernel/random/uuid; wc -l < /run/count; \
             hostname > /root/mine; sync",
        );
        let told: Vec<&str> = told.lines().collect();
        assert_eq!(told[0], clone.hostname());
        seen.extend(told[..3].iter().map(|&line| line.to_owned()));
        let counted: u64 = told[3].parse().unwrap();
        assert_right_time(&clone);
        clones.push((clone, counted));
    }
    assert_eq!(seen.len(), wanted * 3, "names and random numbers are all different");
    let (took, used) = (begun.elapsed(), free.saturating_sub(available_kib()));
    println!(
        "{wanted} clones in {:.1} s, {:.0} ms and {} KiB of the host's memory each",
        took.as_secs_f64(),
        took.as_secs_f64() * 1000.0 / wanted as f64,
        used / wanted as u64
    );
    for (clone, counted) in &clones {
        assert_eq!(clone.shell("cat /root/mine").trim(), clone.hostname());
        assert_eq!(clone.shell("hostname").trim(), clone.hostname());
        assert_right_time(clone);
        counts_past(clone, *counted);
    }
}

fn available_kib() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
