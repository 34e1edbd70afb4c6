//! The jail of a running machine, looked at from outside.

use crate::{
    process::{self, descriptors, namespace, read, status, threads},
    trace::Traced,
    world::{Guest, SMALL, Shape, World, wait},
};
use bivouac_protocol::monitor::{FromMonitor, ToMonitor};
use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt, path::Path};

const TWO: Shape = Shape { vcpus: 2, ..SMALL };

/// Two users that nothing else on the host is, and nothing that root has.
#[test]
fn each_monitor_is_a_user_of_its_own_without_any_privilege() {
    let world = World::new();
    let (one, other) = (world.boot(SMALL), world.boot(SMALL));
    let mut users = Vec::new();
    for guest in [&one, &other] {
        let pid = guest.pid();
        for thread in threads(pid) {
            let status = status(pid, thread.tid);
            let uid: u32 = status["Uid"].split(' ').next().unwrap().parse().unwrap();
            assert!(uid >= 1_600_000_000, "{thread:?} is user {uid}");
            let four = format!("{uid} {uid} {uid} {uid}");
            assert_eq!((&status["Uid"], &status["Gid"]), (&four, &four), "{thread:?}");
            assert_eq!(status["Groups"], "", "{thread:?}");
            for set in ["CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"] {
                assert_eq!(status[set], "0000000000000000", "{set} of {thread:?}");
            }
            assert_eq!(status["NoNewPrivs"], "1", "{thread:?}");
            users.push(uid);
        }
        // Files of a process that can be dumped belong to its user.
        for file in ["environ", "mem", "maps", "fd"] {
            let owner = fs::metadata(process::path(pid, file)).unwrap().uid();
            assert_eq!(owner, 0, "/proc/{pid}/{file} belongs to {owner}");
        }
        assert_eq!(read(pid, "environ"), "", "it was started without an environment");
    }
    users.dedup();
    assert_eq!(users.len(), 2, "{users:?}");
}

/// Every thread that makes system calls has a filter, and each kind another one.
#[test]
fn each_kind_of_thread_has_a_filter_of_its_own() {
    let world = World::new();
    let guest = world.boot(TWO);
    let pid = guest.pid();
    let mut filters: BTreeMap<String, Vec<Vec<u64>>> = BTreeMap::new();
    let threads = threads(pid);
    for thread in threads.iter().filter(|thread| !thread.kernel) {
        let status = status(pid, thread.tid);
        assert_eq!(
            (status["Seccomp"].as_str(), status["Seccomp_filters"].as_str()),
            ("2", "1"),
            "{thread:?}"
        );
        let filter = Traced::stop(thread.tid).filter();
        filters.entry(thread.kind().to_owned()).or_default().push(filter);
    }
    let kinds: Vec<(&str, usize)> = filters.iter().map(|(kind, all)| (kind.as_str(), all.len())).collect();
    assert_eq!(kinds, [("control", 1), ("devices", 1), ("vcpu", 2)], "{threads:?}");
    assert_eq!(filters["vcpu"][0], filters["vcpu"][1]);
    let of = |kind: &str| &filters[kind][0];
    assert!(of("control") != of("devices") && of("devices") != of("vcpu") && of("vcpu") != of("control"));
    // It was stopped and let go on, and is none the worse for it.
    assert_eq!(guest.shell("echo well"), "well\n");
}

#[test]
fn it_sees_nothing_of_the_host() {
    let world = World::new();
    let guest = world.boot(SMALL);
    let pid = guest.pid();
    for kind in ["mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        assert_ne!(namespace(&pid.to_string(), kind), namespace("self", kind), "{kind}");
    }
    // The first process of its namespace, in which there is no other.
    let main = status(pid, pid);
    assert_eq!(main["NSpid"], format!("{pid} 1"));
    assert_eq!(processes_in(&namespace(&pid.to_string(), "pid")), [pid]);

    let root = process::path(pid, "root");
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    let refused = fs::write(root.join("new"), "").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS), "{refused}");
    let mounts = read(pid, "mountinfo");
    let mounts: Vec<&str> = mounts.lines().collect();
    assert_eq!(mounts.len(), 1, "{mounts:?}");
    assert!(mounts[0].contains(" / / ro,nosuid,nodev,noexec"), "{mounts:?}");
    assert_eq!(fs::read_link(process::path(pid, "cwd")).unwrap(), Path::new("/"));

    let interfaces = interfaces(pid);
    assert_eq!(interfaces, [("lo".to_owned(), false)], "names, and whether they are up");
    assert_eq!(read(pid, "net/if_inet6"), "");
    assert_eq!(read(pid, "net/route").lines().skip(1).count(), 0, "a heading at most, and no route");
}

#[test]
fn its_limits_are_in_force() {
    let world = World::new();
    let guest = world.boot(SMALL);
    let pid = guest.pid();
    let limits = read(pid, "limits");
    for (name, most) in [
        ("Max open files", "256"),
        ("Max processes", "64"),
        ("Max file size", "68719476736"),
        ("Max core file size", "0"),
        ("Max locked memory", "0"),
        ("Max msgqueue size", "0"),
    ] {
        let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
        let values: Vec<&str> = line[name.len()..].split_whitespace().collect();
        assert_eq!(values[..2], [most, most], "{line}");
    }
    let cgroup = guest.cgroup();
    assert_eq!(
        read(pid, "cgroup").trim(),
        format!("0::/{}", cgroup.strip_prefix("/sys/fs/cgroup").unwrap().display())
    );
    let limit = |name: &str| fs::read_to_string(cgroup.join(name)).unwrap().trim().to_owned();
    assert_eq!(limit("memory.max"), ((64 + 64) << 20).to_string());
    assert_eq!(limit("memory.oom.group"), "1");
    assert_eq!(limit("pids.max"), "128");
    if cgroup.join("memory.swap.max").exists() {
        assert_eq!(limit("memory.swap.max"), "0");
    }
}

/// What it has open is what it works with: no kernel, no cgroup, no `/dev/kvm`, nothing that the daemon has.
#[test]
fn it_has_open_what_it_works_with_and_nothing_else() {
    let world = World::new();
    let guest = world.boot(TWO);
    assert_eq!(kinds(&guest), expected(2));

    // A clone does too, and keeps open the memory that it maps.
    let folder = guest.save("saved");
    let clone = world.clone_of(&folder, TWO);
    let mut with_memory = expected(2);
    with_memory.insert("saved memory".to_owned(), 1);
    assert_eq!(kinds(&clone), with_memory);
    assert_eq!(kinds(&guest), expected(2), "the files of a snapshot are closed when it is written");

    // A daemon that comes again takes the place of the connection before.
    let again = wait("a machine is found", bivouacd::machine::Machines::find(&world.machines, &guest.id));
    let again = again.unwrap().expect("it lives");
    let answer = wait("an answer", again.ask(ToMonitor::Status, Vec::new())).unwrap();
    assert!(matches!(answer, FromMonitor::Status { .. }), "{answer:?}");
    assert_eq!(kinds(&guest), expected(2));
}

/// Five queues' kicks (block twice, vsock's two for data, entropy), four devices' interrupts, both ends of the three wakes of those
/// that the device thread serves, both ends of the guest's reset, the machine's end, and one of each event loop's own.
const EVENTFDS: usize = 5 + 4 + 3 * 2 + 2 + 1 + 2;

fn expected(vcpus: usize) -> BTreeMap<String, usize> {
    let counts = [
        // Standard input and output.
        ("/dev/null", 2),
        ("monitor.log", 1),
        ("lock", 1),
        ("rootfs.erofs", 1),
        ("scratch.img", 1),
        ("/dev/vhost-vsock", 1),
        // The one that listens, and the daemon's connection.
        ("socket", 2),
        // The control thread's and the device thread's.
        ("anon_inode:[eventpoll]", 2),
        ("anon_inode:kvm-vm", 1),
        ("anon_inode:kvm-vcpu", vcpus),
        ("anon_inode:[eventfd]", EVENTFDS),
    ];
    counts.into_iter().map(|(kind, count)| (kind.to_owned(), count)).collect()
}

fn kinds(guest: &Guest) -> BTreeMap<String, usize> {
    let folder = guest.folder();
    let mut kinds = BTreeMap::new();
    for target in descriptors(guest.pid()).into_values() {
        let own = Path::new(&target).strip_prefix(&folder).map(|file| file.display().to_string());
        let kind = match own {
            Ok(file) => file,
            Err(_) if target.ends_with("/rootfs.erofs") => "rootfs.erofs".to_owned(),
            Err(_) if target.ends_with("/saved/memory") => "saved memory".to_owned(),
            Err(_) => {
                target.split(':').filter(|part| part.parse::<u32>().is_err()).collect::<Vec<_>>().join(":")
            }
        };
        let kind = if kind.starts_with("socket:") { "socket".to_owned() } else { kind };
        *kinds.entry(kind).or_insert(0) += 1;
    }
    kinds
}

/// Every process in a PID namespace.
fn processes_in(namespace: &str) -> Vec<i32> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|found| found.to_str() == Some(namespace))
    })
    .collect()
}

/// The interfaces of a process's network namespace, and whether each is up.
fn interfaces(pid: i32) -> Vec<(String, bool)> {
    let names: Vec<String> = read(pid, "net/dev")
        .lines()
        .skip(2)
        .filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()))
        .collect();
    let namespace = fs::File::open(process::path(pid, "ns/net")).unwrap();
    // A thread of its own, since it never comes back from there.
    let look = move || {
        let network = rustix::thread::LinkNameSpaceType::Network;
        rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), Some(network))
            .unwrap();
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        names.into_iter().map(|name| (name.clone(), is_up(&socket, &name))).collect()
    };
    std::thread::spawn(look).join().unwrap()
}

fn is_up(socket: &std::net::UdpSocket, name: &str) -> bool {
    use std::os::fd::AsRawFd;
    // SAFETY: plain data, for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte as libc::c_char;
    }
    // SAFETY: SIOCGIFFLAGS reads the name and writes the flags of a live request.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as _, &raw mut request) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: it is the field that the call has just written.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    i32::from(flags) & libc::IFF_UP != 0
}
