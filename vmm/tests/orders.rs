//! The program as a process, up to the point where it would become a machine: whoever starts it wrongly, or says to it what cannot be
//! understood, gets a word of why and an exit code, in no time. Needs neither KVM nor root.

use bivouac_protocol::monitor::{
    BootConfig, FromMonitor, Jail, MAX_MESSAGE, RestoreConfig, ToMonitor, VERSION, decode, encode, fd,
};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, bind, connect, listen, recv, sendmsg, socket_with,
};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{IoSlice, PipeReader, PipeWriter, Read},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

/// More than a process takes to say no, on a machine that is busy with others.
const PATIENCE: Duration = Duration::from_secs(20);
/// Exit code of a program that was started wrongly, and of one whose machine could not be made.
const MISUSE: i32 = 2;
const FAILED: i32 = 1;

/// What a monitor is started with: all of it right at first, for a test to spoil.
struct Start {
    parts: BTreeMap<RawFd, OwnedFd>,
    peer: OwnedFd,
    _folder: tempfile::TempDir,
}

/// How it ended.
struct Ended {
    code: Option<i32>,
    said: String,
    /// The last message on the socket.
    answer: Option<FromMonitor>,
}

/// Takes every number that has a meaning in the child, so that nothing the child is started by is moved over. The first act of
/// every test.
fn reserve_numbers() {
    static FILLERS: OnceLock<Vec<File>> = OnceLock::new();
    FILLERS.get_or_init(|| {
        let mut fillers = Vec::new();
        while fillers.last().is_none_or(|last: &File| last.as_raw_fd() < fd::END) {
            fillers.push(File::open("/dev/null").unwrap());
        }
        fillers
    });
}

fn seqpacket() -> OwnedFd {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

impl Start {
    fn new() -> Self {
        reserve_numbers();
        let folder = tempfile::tempdir().unwrap();
        let address = SocketAddrUnix::new(folder.path().join("control")).unwrap();
        let (listener, peer) = (seqpacket(), seqpacket());
        bind(&listener, &address).unwrap();
        listen(&listener, 1).unwrap();
        connect(&peer, &address).unwrap();
        let device = || OwnedFd::from(File::options().read(true).write(true).open("/dev/null").unwrap());
        let file = || {
            let file = tempfile::tempfile_in(folder.path()).unwrap();
            file.set_len(4096).unwrap();
            OwnedFd::from(file)
        };
        let parts = [
            (fd::CONTROL, listener),
            (fd::KERNEL, file()),
            (fd::ROOT, file()),
            (fd::SCRATCH, file()),
            (fd::KVM, device()),
            (fd::VSOCK, device()),
            (fd::STATE, file()),
            (fd::MEMORY, file()),
        ];
        Self { parts: parts.into(), peer, _folder: folder }
    }

    fn with(mut self, number: RawFd, part: impl Into<OwnedFd>) -> Self {
        self.parts.insert(number, part.into());
        self
    }

    fn without(mut self, number: RawFd) -> Self {
        self.parts.remove(&number);
        self
    }

    fn say(self, packet: &[u8], files: usize) -> Self {
        let null = File::open("/dev/null").unwrap();
        let along: Vec<_> = (0..files).map(|_| null.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if files > 0 {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&along)));
        }
        sendmsg(&self.peer, &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        self
    }

    fn order(self, order: &ToMonitor) -> Self {
        self.say(&encode(order).unwrap(), 0)
    }

    /// Runs it, and waits for its end. `hang_up`: nobody says anything more.
    fn run(self, hang_up: bool) -> Ended {
        let mut child = self.spawn();
        let peer = (!hang_up).then_some(self.peer);
        let begun = Instant::now();
        let code = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status.code();
            }
            if begun.elapsed() > PATIENCE {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("it hangs");
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(!said.contains("panicked") && said.len() < 1024, "{said}");
        let answer = peer.and_then(|peer| {
            let mut packet = vec![0; MAX_MESSAGE];
            let (len, _) = recv(&peer, packet.as_mut_slice(), RecvFlags::DONTWAIT).ok()?;
            decode(&packet[..len]).ok()
        });
        Ended { code, said, answer }
    }

    fn spawn(&self) -> Child {
        // Out of the way of the numbers they are to get.
        let held: Vec<(OwnedFd, RawFd)> = self
            .parts
            .iter()
            .map(|(number, part)| (rustix::io::fcntl_dupfd_cloexec(part, fd::END).unwrap(), *number))
            .collect();
        let moves: Vec<_> = held.iter().map(|(from, to)| (from.as_raw_fd(), *to)).collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_bivouac-vmm"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let missing: Vec<_> =
            (fd::CONTROL..fd::END).filter(|number| !self.parts.contains_key(number)).collect();
        let place = move || {
            for number in &missing {
                // SAFETY: nothing in this child uses the number; one that is not open stays so.
                unsafe { libc::close(*number) };
            }
            for (from, to) in &moves {
                // SAFETY: both are numbers; what stood under the second is a filler.
                if unsafe { libc::dup2(*from, *to) } < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: between fork and exec the closure makes system calls, and allocates nothing.
        unsafe { command.pre_exec(place) };
        command.spawn().unwrap()
    }
}

impl Ended {
    #[track_caller]
    fn expect(&self, code: i32, word: &str) {
        assert_eq!(self.code, Some(code), "{}", self.said);
        assert!(self.said.contains(word), "{}", self.said);
    }
}

fn jail() -> Jail {
    Jail { uid: 70_000, gid: 70_000 }
}

fn boot() -> BootConfig {
    BootConfig {
        version: VERSION,
        jail: jail(),
        vcpus: 1,
        memory_mib: 64,
        cid: 77,
        cmdline: "quiet".into(),
        console: false,
        network: None,
    }
}

fn restore() -> RestoreConfig {
    RestoreConfig {
        version: VERSION,
        jail: jail(),
        cid: 77,
        verify: true,
        network: None,
        prefetch: Vec::new(),
        record: false,
    }
}

/// One of each kind that is no regular file. The pipe's other end is open, so that a read of it would wait for ever.
fn wrong_kinds() -> (Vec<(&'static str, OwnedFd)>, PipeWriter) {
    reserve_numbers();
    let (reader, writer): (PipeReader, PipeWriter) = std::io::pipe().unwrap();
    let kinds = vec![
        ("directory", File::open("/").unwrap().into()),
        ("pipe", reader.into()),
        ("device", File::open("/dev/zero").unwrap().into()),
        ("socket", seqpacket()),
    ];
    (kinds, writer)
}

#[test]
fn a_first_message_of_garbage_is_told_from_a_daemon_that_hung_up() {
    for garbage in [&[0xff; 40][..], &[9], &[0; 3], &[0x80; 64], &vec![0x55; 60_000]] {
        Start::new().say(garbage, 0).run(false).expect(MISUSE, "a message cannot be understood");
    }
    Start::new().run(true).expect(MISUSE, "the daemon hung up");
}

#[test]
fn a_truncated_order_is_no_order() {
    for order in [ToMonitor::Boot(boot()), ToMonitor::Restore(restore())] {
        let whole = encode(&order).unwrap();
        for len in [1, 2, whole.len() / 2, whole.len() - 1] {
            Start::new().say(&whole[..len], 0).run(false).expect(MISUSE, "a message cannot be understood");
        }
    }
}

#[test]
fn an_order_that_is_too_long_or_comes_with_too_many_descriptors_is_refused() {
    let long = vec![0; MAX_MESSAGE + 1];
    Start::new().say(&long, 0).run(false).expect(MISUSE, "longer than the longest");
    let order = encode(&ToMonitor::Boot(boot())).unwrap();
    for files in [3, 16] {
        Start::new().say(&order, files).run(false).expect(MISUSE, "more descriptors than there is room for");
    }
}

#[test]
fn only_an_order_to_begin_can_come_first() {
    for order in [ToMonitor::Status, ToMonitor::Pause, ToMonitor::Snapshot, ToMonitor::Stop] {
        Start::new().order(&order).run(false).expect(MISUSE, "Boot or Restore");
    }
}

#[test]
fn what_has_to_be_a_file_and_is_none_is_named() {
    let (kinds, _writer) = wrong_kinds();
    for (kind, part) in kinds {
        let again = || part.try_clone().unwrap();
        let is = format!("is no regular file, it is a {kind}");
        for number in [fd::ROOT, fd::SCRATCH] {
            Start::new().with(number, again()).run(false).expect(MISUSE, &is);
        }
        let boot = ToMonitor::Boot(boot());
        Start::new().with(fd::KERNEL, again()).order(&boot).run(false).expect(MISUSE, &is);
        let restore = ToMonitor::Restore(restore());
        for number in [fd::STATE, fd::MEMORY] {
            let ended = Start::new().with(number, again()).order(&restore).run(false);
            ended.expect(MISUSE, &is);
            ended.expect(MISUSE, &number.to_string());
        }
    }
}

#[test]
fn what_is_missing_is_named() {
    for (number, name) in [
        (fd::CONTROL, "bivouac run"),
        (fd::KVM, "/dev/kvm"),
        (fd::VSOCK, "/dev/vhost-vsock"),
        (fd::ROOT, "root image"),
        (fd::SCRATCH, "scratch disk"),
    ] {
        Start::new().without(number).run(false).expect(MISUSE, name);
    }
    let boot = ToMonitor::Boot(boot());
    Start::new().without(fd::KERNEL).order(&boot).run(false).expect(MISUSE, "guest kernel");
    let restore = ToMonitor::Restore(restore());
    Start::new().without(fd::STATE).order(&restore).run(false).expect(MISUSE, "saved state");
    Start::new().without(fd::MEMORY).order(&restore).run(false).expect(MISUSE, "saved memory");
}

#[test]
fn a_control_socket_that_is_none_ends_it() {
    reserve_numbers();
    let (reader, _writer) = std::io::pipe().unwrap();
    Start::new().with(fd::CONTROL, reader).run(false).expect(FAILED, "accept a control connection");
}

type Spoil = fn(&mut BootConfig);

/// Refused before the jail, and told on both ways.
#[test]
fn an_order_that_makes_no_machine_is_refused_with_the_reason() {
    let wrong: [(Spoil, &str); 6] = [
        (|boot| boot.version = VERSION + 1, "speaks version"),
        (|boot| boot.cid = 2, "context id 2"),
        (|boot| boot.cid = u32::MAX, "context id"),
        (|boot| boot.vcpus = 0, "vcpus is 0"),
        (|boot| boot.vcpus = 255, "vcpus is 255"),
        (|boot| boot.memory_mib = u32::MAX, "memory_mib"),
    ];
    let roots = [
        ToMonitor::Boot(BootConfig { jail: Jail { uid: 0, gid: 1 }, ..boot() }),
        ToMonitor::Restore(RestoreConfig { jail: Jail { uid: 1, gid: 0 }, ..restore() }),
    ];
    let orders = wrong.into_iter().map(|(spoil, word)| {
        let mut config = boot();
        spoil(&mut config);
        (ToMonitor::Boot(config), word)
    });
    for (order, word) in orders.chain(roots.map(|order| (order, "does not run a guest as root"))) {
        let ended = Start::new().order(&order).run(false);
        ended.expect(FAILED, word);
        match ended.answer {
            Some(FromMonitor::Failed { detail }) => assert!(detail.contains(word), "{detail}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn it_says_what_it_is_to_whoever_starts_it_by_hand() {
    reserve_numbers();
    let output = Command::new(env!("CARGO_BIN_EXE_bivouac-vmm")).arg("--version").output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().starts_with("bivouac-vmm "));
}
