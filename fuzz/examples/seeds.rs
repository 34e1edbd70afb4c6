//! Writes the inputs that the corpus grew from: for each target some that a well-behaved peer would make, and some that a
//! test beside the code is about: `cargo run --example seeds FOLDER`, and each target has its folder there.

use bivouac_fuzz::{BUFFERS, SIZE_MAX};
use bivouac_protocol::{
    agent::{
        Configure, Ended, FileInfo, Hello, Limit, More, Open, Outcome, Refusal, Reply, Request, StartCommand,
        StartFailure, StartFailureKind, Stream, VERSION,
    },
    frame,
    monitor::{
        self, BootConfig, FromMonitor, Jail, Network, PageRun, RestoreConfig, State, StopReason, Timing,
        ToMonitor,
    },
};
use bivouac_vmm::{
    devices::virtio::transport::TransportState,
    snapshot::{self, DeviceState, MachineState, MemoryLayout},
};
use kvm_bindings::{kvm_clock_data, kvm_irqchip, kvm_pit_state2};
use std::{fs, io, path::Path};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Data across the border of two regions, and in the pair of regions beyond the hole.
const BORDER: u64 = 0x7fc0;
const FAR: u64 = 0x1_3f00;

fn main() -> io::Result<()> {
    let folder = std::env::args().nth(1).ok_or_else(|| io::Error::other("usage: seeds FOLDER"))?;
    let targets = [
        ("block", block()),
        ("net", net()),
        ("transport", transport()),
        ("protocol", protocol()),
        ("snapshot", saved()),
    ];
    for (target, seeds) in targets {
        let folder = Path::new(&folder).join(target);
        fs::create_dir_all(&folder)?;
        for (number, seed) in seeds.iter().enumerate() {
            fs::write(folder.join(format!("seed-{number:02}")), seed)?;
        }
    }
    Ok(())
}

/// Address, length, flags; linked in order.
type Chain = Vec<(u64, u32, u16)>;

/// One input of a device target: queues of 16 entries with these chains, then guest memory.
struct Device {
    flags: u8,
    knobs: u16,
    steps: Vec<[u8; 4]>,
    queues: Vec<Vec<Chain>>,
    memory: Vec<u8>,
}

impl Device {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![4, self.flags, 0, 0];
        bytes.extend(self.knobs.to_le_bytes());
        bytes.push(self.steps.len() as u8);
        bytes.extend(self.steps.iter().flatten());
        for chains in &self.queues {
            let (mut table, mut heads) = (Vec::new(), Vec::new());
            for chain in chains {
                heads.push(table.len() as u16 / 16);
                table.extend(linked(chain, table.len() as u16 / 16));
            }
            table.resize(16 * 16, 0);
            bytes.extend(table);
            let ring = [&[0, heads.len() as u16], heads.as_slice()].concat();
            let mut ring: Vec<u8> = ring.iter().flat_map(|entry| entry.to_le_bytes()).collect();
            ring.resize(2 * 16 + 6, 0);
            bytes.extend(ring);
        }
        bytes.extend(&self.memory);
        bytes
    }
}

fn linked(chain: &[(u64, u32, u16)], first: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (at, (address, len, flags)) in chain.iter().enumerate() {
        let link = if at + 1 < chain.len() { NEXT } else { 0 };
        bytes.extend(address.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend((flags | link).to_le_bytes());
        bytes.extend((first + at as u16 + 1).to_le_bytes());
    }
    bytes
}

fn request(kind: u32, sector: u64) -> Vec<u8> {
    [kind.to_le_bytes().as_slice(), &[0; 4], &sector.to_le_bytes(), &[0xee; 16]].concat()
}

fn block() -> Vec<Vec<u8>> {
    let (header, status) = ((BUFFERS, 16, 0), (BUFFERS + 16, 1, WRITE));
    let seed = |kind, sector, flags, knobs, data: &[(u64, u32, u16)]| {
        let chain = [&[header], data, &[status]].concat();
        let queues = vec![vec![chain]];
        Device { flags, knobs, steps: vec![], queues, memory: request(kind, sector) }
    };
    let mut seeds = vec![
        seed(0, 3, 0, 0, &[(BORDER, 512, WRITE)]),
        seed(0, 3, 3, 0b10_01_10, &[(BORDER, 1024, WRITE), (FAR, 512, WRITE)]),
        seed(1, 60, 0, 0, &[(BORDER, 512, 0), (FAR, 1536, 0)]),
        seed(1, 60, 1, 0b11, &[(BORDER, 512, 0)]),
        seed(1, 0, 2, 0, &[(FAR, 512, 0)]),
        seed(4, 0, 0, 0, &[]),
        seed(8, 0, 2, 0, &[(FAR, 20, WRITE)]),
        seed(11, 0, 0, 0, &[(FAR, 16, 0)]),
        seed(0, u64::MAX / 512, 0, 0, &[(FAR, 512, WRITE)]),
        seed(0, 64, 0, 0, &[(FAR, 512, WRITE)]),
    ];
    // In an indirect table behind the header.
    let mut indirect = seed(0, 1, 1, 0, &[]);
    indirect.queues = vec![vec![vec![(BUFFERS + 32, 48, INDIRECT)]]];
    indirect.memory.extend(linked(&[header, (BORDER, 512, WRITE), status], 0));
    seeds.push(indirect);
    // Three requests, one of which is offered only later, and changed before it is.
    let mut several = seed(0, 1, 1, 0, &[(FAR, 512, WRITE)]);
    let chain = several.queues[0][0].clone();
    several.queues[0].extend([chain.clone(), chain]);
    several.steps = vec![[2, 0, 7, 2], [1, 0, 4, 0], [0, 0, 0, 0]];
    seeds.push(several);
    seeds.iter().map(Device::bytes).collect()
}

fn net() -> Vec<Vec<u8>> {
    let buffer = vec![(BORDER, 2048, WRITE)];
    let spread = vec![(BUFFERS + 0x100, 7, WRITE), (BUFFERS + 0x200, 9, WRITE), (BORDER, 2048, WRITE)];
    let large = (0..5).map(|_| (0x8000, 0x4000, WRITE)).collect::<Chain>();
    let frame = vec![(BUFFERS, 72, 0)];
    let pieces = vec![(BUFFERS, 12, 0), (BORDER, 100, 0), (FAR, 1400, 0)];
    let seed = |flags, knobs, receive: &[&Chain], transmit: &[&Chain], header: [u8; 2]| Device {
        flags,
        knobs,
        steps: vec![[3, 0, 60, 0], [1, 0, 3, 0], [0, 0, 0, 0], [0, 1, 0, 0]],
        queues: [receive, transmit]
            .map(|chains| chains.iter().map(|chain| (*chain).clone()).collect())
            .to_vec(),
        memory: [header.as_slice(), &[0; 10], &[0x55; 60]].concat(),
    };
    let mut seeds = vec![
        seed(0, 0, &[&buffer], &[&frame], [0, 0]),
        seed(1, 0, &[&buffer, &spread], &[&frame, &pieces], [0, 0]),
        seed(0x7f, 0, &[&large, &large], &[&pieces], [1, 1]),
        seed(0x7f, 0b10_01, &[&large], &[&frame, &frame, &pieces], [1, 4]),
        seed(0x02, 0, &[], &[&frame], [1, 0]),
        seed(0x02, 0b01_01_01, &[&buffer], &[&frame, &frame], [0, 0]),
        seed(0x10, 0, &[&buffer], &[&frame], [0, 0]),
        seed(0, 0, &[&frame], &[&buffer], [0, 3]),
    ];
    let mut indirect = seed(1, 0, &[], &[], [0, 0]);
    indirect.queues[1] = vec![vec![(BUFFERS + 72, 32, INDIRECT)]];
    indirect.memory.extend(linked(&[(BUFFERS, 12, 0), (FAR, 500, 0)], 0));
    seeds.push(indirect);
    seeds.iter().map(Device::bytes).collect()
}

/// Accesses as the target reads them.
#[derive(Default)]
struct Accesses(Vec<u8>);

impl Accesses {
    fn write(mut self, offset: u16, value: u32) -> Self {
        self.0.push(0);
        self.0.extend((offset / 4).to_le_bytes());
        self.0.push(0);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn read(mut self, how: u8, offset: u16) -> Self {
        self.0.push(0xc0 | how);
        self.0.extend(offset.to_le_bytes());
        self.0.extend([0; 5]);
        self
    }

    fn negotiate(self, low: u32, high: u32) -> Self {
        self.write(0x70, 1)
            .write(0x70, 3)
            .write(0x24, 0)
            .write(0x20, low)
            .write(0x24, 1)
            .write(0x20, high)
            .write(0x70, 11)
    }

    fn queues(mut self, size: u32) -> Self {
        for queue in 0..3 {
            let start = 0x1000 + queue * 0x4000;
            self = self.write(0x30, queue).write(0x38, size).write(0x80, start).write(0x84, 0);
            self = self.write(0x90, start + 0x1000).write(0xa0, start + 0x2000).write(0x44, 1);
        }
        self
    }
}

fn transport() -> Vec<Vec<u8>> {
    let live = || Accesses::default().negotiate(0x3000_0005, 1).queues(16).write(0x70, 15);
    let probe = [0, 4, 8, 12, 16, 0x34, 0x44, 0x60, 0x70, 0xb0, 0xfc, 0x100, 0x10c];
    [
        live(),
        live().write(0x70, 0).negotiate(0, 1).queues(8).write(0x70, 15),
        live().write(0x70, 143).write(0x70, 0),
        live().write(0x38, 4).write(0x80, 0).write(0x44, 0).write(0x64, 1).write(0x50, 0),
        Accesses::default().negotiate(2, 1),
        Accesses::default().negotiate(1, 0).write(0x70, 0),
        Accesses::default().negotiate(1, 1).queues(u32::from(SIZE_MAX)).write(0x84, 1).write(0x70, 15),
        Accesses::default().negotiate(1, 1).write(0x70, 15),
        probe.into_iter().fold(live(), |accesses, offset| accesses.read(0, offset)),
        (0..8).fold(live(), |accesses, how| accesses.read(how, 0x101)),
    ]
    .into_iter()
    .map(|accesses| accesses.0)
    .collect()
}

/// Postcard's varint.
fn number(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A device's state as the monitor writes it, with two queues of 16: field by field, since no one can make one outside.
fn device_state(phase: u8, active: bool, features: u64, ready: bool) -> Vec<u8> {
    let mut bytes = vec![phase, active.into(), 1];
    bytes.push(1);
    bytes.extend(number(features));
    bytes.extend([1, 0, 2]);
    for (at, most) in [(0x1000_u64, 64), (0x8000, 256)] {
        bytes.extend([number(most), number(5), number(4)].concat());
        bytes.push((features >> 29 & 1) as u8);
        bytes.push(16);
        bytes.push(ready.into());
        bytes.extend([number(at), number(at + 0x1000), number(at + 0x2000)].concat());
    }
    bytes
}

fn saved() -> Vec<Vec<u8>> {
    const VERSION_1: u64 = 1 << 32;
    const EVENT_IDX: u64 = 1 << 29;
    let device = |state: &[u8], accesses: &[[u8; 6]]| {
        let mut bytes = vec![2, state.len().div_ceil(16) as u8];
        bytes.extend(state);
        bytes.resize(2 + state.len().div_ceil(16) * 16, 0);
        bytes.push(1);
        bytes.extend(accesses.as_flattened());
        bytes
    };
    let sleep = [0xff, 0, 0, 0, 0, 0];
    let status = |value: u8| [0, 0x1c, value, 0, 0, 0];
    let whole = snapshot::encode(&MachineState {
        memory: MemoryLayout::default(),
        vcpus: Vec::new(),
        irqchips: vec![kvm_irqchip::default(); 3],
        pit: kvm_pit_state2::default(),
        clock: kvm_clock_data::default(),
        devices: vec![DeviceState { id: 42, transport: TransportState::default() }],
    })
    .expect("small enough");
    // The same with memory of 64 MiB, whose checksums are those of zeroes; its devices are none.
    let zeroes = crc32fast::hash(&vec![0; 1 << 20]);
    let mut memory = [number(64), number(64)].concat();
    memory.extend((0..64).flat_map(|_| number(zeroes.into())));
    memory.extend(&whole[24 + 2..whole.len() - 1]);
    let live = |features| device_state(4, true, features, true);
    let mut seeds = vec![
        device(&live(VERSION_1 | EVENT_IDX), &[sleep, status(0), status(1), status(3)]),
        device(&live(VERSION_1), &[status(128), sleep, status(0)]),
        device(&device_state(5, true, VERSION_1, true), &[sleep, status(0)]),
        device(&device_state(3, false, VERSION_1, true), &[status(15), sleep]),
        device(&device_state(2, false, 0, false), &[sleep, status(11)]),
        device(&device_state(0, false, 0, false), &[status(1)]),
        [&[1], whole.as_slice()].concat(),
        [&[0], &whole[24..]].concat(),
        [&[0], memory.as_slice()].concat(),
    ];
    let feature =
        |function: u32, bits: u32| [&function.to_le_bytes()[..], &[0, 0, 1, 0], &bits.to_le_bytes()].concat();
    let pairs = (0..7).flat_map(|function| [feature(function, 0b101), feature(function, 0b111)]);
    seeds.push(pairs.fold(vec![3], |seed, entry| [seed, entry].concat()));
    seeds
}

fn protocol() -> Vec<Vec<u8>> {
    let words = || vec!["python3".to_owned(), "-c".to_owned()];
    let pair = || vec![("HOME".to_owned(), "/root".to_owned())];
    let text = |text: &str| text.to_owned();
    let open = |request| framed(0, &Open { version: VERSION, request });
    let configure = || Configure {
        hostname: text("sandbox"),
        entropy: vec![7; 32],
        unix_time_ns: 1_700_000_000_000_000_000,
        env: pair(),
        user: text("root"),
        workdir: text("/work"),
    };
    let ended = |outcome| Ended {
        outcome,
        stdout_bytes: 5,
        stderr_bytes: 0,
        wall_us: 1000,
        user_us: 10,
        system_us: 20,
        max_rss_kib: 4096,
        limits_hit: vec![Limit::Memory, Limit::Pids],
    };
    let start = StartCommand {
        command_id: text("cmd_1"),
        argv: words(),
        cwd: Some(text("/work")),
        env: pair(),
        user: None,
        timeout_ms: Some(60_000),
    };
    let jail = Jail { uid: 70_000, gid: 70_000 };
    let network = Some(Network { mac: [2, 0, 0, 0, 0, 1], mtu: 1500 });
    let boot = BootConfig {
        version: monitor::VERSION,
        jail,
        vcpus: 2,
        memory_mib: 512,
        cid: 7,
        cmdline: text("quiet"),
        console: false,
        network,
    };
    let prefetch = vec![PageRun { first: 3, count: 2, written: true }];
    let restore = RestoreConfig {
        version: monitor::VERSION,
        jail,
        cid: 8,
        verify: true,
        network,
        prefetch,
        record: false,
    };
    let failure = StartFailure { kind: StartFailureKind::NotFound, detail: text("no such program") };
    let id = || text("cmd_1");
    vec![
        open(Request::Ping),
        open(Request::Configure(configure())),
        open(Request::Start(start)),
        open(Request::Attach { command_id: id(), stdout_offset: 1, stderr_offset: u64::MAX }),
        open(Request::Signal { command_id: id(), signal: -1 }),
        open(Request::WriteFile { path: text("/a"), user: Some(text("u")), mode: Some(0o644) }),
        framed(1, &More::Stdin(vec![1; 100])),
        framed(1, &More::Ack { stdout: 1 << 40, stderr: 3 }),
        framed(2, &Reply::Pong { version: 1, boot_id: text("b"), configured: true }),
        framed(2, &Reply::Output { stream: Stream::Stderr, offset: 9, data: vec![0xff; 40] }),
        framed(2, &Reply::Ended(ended(Outcome::StartFailed(failure)))),
        framed(2, &Reply::File(FileInfo { size: 1, mode: 0o600, uid: 0, gid: 0, modified: -5 })),
        framed(2, &Reply::Refused(Refusal::File { errno: 2, detail: text("/a: no such file") })),
        framed(3, &Hello { version: VERSION, boot_id: text("boot"), uptime_us: 90_000 }),
        framed(4, &configure()),
        framed(5, &ended(Outcome::Signaled { signal: 9, oom_killed: true })),
        packet(6, &ToMonitor::Boot(boot)),
        packet(6, &ToMonitor::Restore(restore)),
        packet(6, &ToMonitor::Snapshot),
        packet(6, &ToMonitor::Stop),
        packet(
            7,
            &FromMonitor::Booted(Timing {
                configured_us: 1,
                jailed_us: 2,
                booted_us: 300,
                ..Timing::default()
            }),
        ),
        packet(7, &FromMonitor::Status { state: State::Running, exits: 1 << 33 }),
        packet(7, &FromMonitor::Stopped(StopReason::Fault { detail: text("why") })),
    ]
}

fn framed<T: serde::Serialize>(kind: u8, message: &T) -> Vec<u8> {
    let wire = frame::encode(message).expect("small enough");
    [&[kind, kind * 40], wire.as_slice(), wire.as_slice()].concat()
}

fn packet<T: serde::Serialize>(kind: u8, message: &T) -> Vec<u8> {
    [&[kind, 0], monitor::encode(message).expect("small enough").as_slice()].concat()
}
