//! A world without KVM, for tests: machines that are a row in a table, and an agent that keeps the protocol's promises
//! over an in-memory connection. It can be told to fail, to wait and to lose things.

use super::{BoxChannel, Machine, MachineEnd, MachineError, MachineSpec, Machines};
use crate::agent::{Announcements, wire};
use crate::ids::SandboxId;
use crate::lifecycle::{Reason, Scope};
use crate::sync::lock;
use async_trait::async_trait;
use bivouac_protocol::agent::{
    Configure, Ended, FileInfo, Hello, Limit, More, Open, Outcome, Refusal, Reply, Request, StartCommand,
    StartFailure, StartFailureKind, Stream, VERSION,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

#[derive(Clone)]
pub struct Simulated {
    data_dir: PathBuf,
    world: Arc<Mutex<World>>,
    pub announcements: Announcements,
}

#[derive(Default)]
struct World {
    prepared: BTreeSet<SandboxId>,
    machines: HashMap<SandboxId, Arc<Guest>>,
    orders: Orders,
    /// Everything that was ever launched, in order.
    launched: Vec<SandboxId>,
}

/// What is to go wrong.
#[derive(Default, Clone)]
pub struct Orders {
    /// The machine cannot be made, for this reason.
    pub boot_fails: Option<String>,
    /// Guests do not announce themselves.
    pub silent: bool,
    /// This many launches find their CID taken.
    pub cids_taken: u32,
    /// This many releases fail.
    pub releases_fail: u32,
}

pub struct Guest {
    cid: u32,
    boot_id: String,
    end: watch::Sender<Option<MachineEnd>>,
    pub configured: Mutex<Option<Configure>>,
    commands: Mutex<HashMap<String, Arc<watch::Sender<Run>>>>,
    /// How often each argv was really started.
    pub starts: Mutex<BTreeMap<String, u32>>,
    pub files: Mutex<BTreeMap<String, Vec<u8>>>,
    connections: watch::Sender<u32>,
    pub released: Mutex<Vec<String>>,
}

#[derive(Default, Clone)]
struct Run {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    ended: Option<Outcome>,
    limits_hit: Vec<Limit>,
}

impl Simulated {
    pub fn new(data_dir: PathBuf) -> Self {
        Self { data_dir, world: Arc::default(), announcements: Announcements::default() }
    }

    /// The same world, as a daemon that starts again sees it.
    pub fn for_another_daemon(&self) -> Self {
        Self { announcements: Announcements::default(), ..self.clone() }
    }

    pub fn order(&self, change: impl FnOnce(&mut Orders)) {
        change(&mut lock(&self.world).orders);
    }

    pub fn guest(&self, id: &str) -> Option<Arc<Guest>> {
        lock(&self.world).machines.get(&SandboxId::parse(id)?).cloned()
    }

    /// Everything the host holds something for.
    pub fn held(&self) -> BTreeSet<SandboxId> {
        let world = lock(&self.world);
        world.prepared.iter().chain(world.machines.keys()).cloned().collect()
    }

    pub fn launches(&self) -> usize {
        lock(&self.world).launched.len()
    }

    pub fn leave_an_orphan(&self) -> SandboxId {
        let id = SandboxId::new();
        lock(&self.world).prepared.insert(id.clone());
        id
    }

    /// Lets a guest announce itself that was held back.
    pub fn announce(&self, id: &str) {
        if let Some(guest) = self.guest(id) {
            tokio::spawn(announce(self.announcements.clone(), guest));
        }
    }
}

async fn announce(announcements: Announcements, guest: Arc<Guest>) {
    let (host, mut ours) = tokio::io::duplex(1 << 20);
    announcements.arrived(guest.cid, Box::new(host));
    let hello = Hello { version: VERSION, boot_id: guest.boot_id.clone(), uptime_us: 1_000 };
    let done = async {
        wire::send(&mut ours, &hello).await?;
        let configure: Configure = wire::receive(&mut ours).await?;
        *lock(&guest.configured) = Some(configure);
        wire::send(&mut ours, &Reply::Configured).await
    };
    let _ = done.await;
}

#[async_trait]
impl Machines for Simulated {
    async fn prepare(&self, spec: &MachineSpec) -> Result<(), MachineError> {
        lock(&self.world).prepared.insert(spec.id.clone());
        let folder = self.data_dir.join("sandboxes").join(spec.id.as_str()).join("commands");
        std::fs::create_dir_all(folder).map_err(MachineError::io("making the folder"))
    }

    async fn launch(&self, spec: &MachineSpec) -> Result<Machine, MachineError> {
        let (end, ended) = watch::channel(None);
        let (booted_keep, booted) = watch::channel(None);
        let guest = Arc::new(Guest {
            cid: spec.cid,
            boot_id: format!("boot-of-{}", spec.id),
            end,
            configured: Mutex::default(),
            commands: Mutex::default(),
            starts: Mutex::default(),
            files: Mutex::default(),
            connections: watch::Sender::new(0),
            released: Mutex::default(),
        });
        let orders = {
            let mut world = lock(&self.world);
            assert!(world.prepared.contains(&spec.id), "launched before it was prepared");
            assert!(!world.machines.contains_key(&spec.id), "a second machine on one disk");
            world.launched.push(spec.id.clone());
            let orders = world.orders.clone();
            if orders.cids_taken > 0 {
                world.orders.cids_taken -= 1;
                guest.end.send_replace(Some(MachineEnd::CidTaken));
            } else if let Some(why) = &orders.boot_fails {
                guest.end.send_replace(Some(MachineEnd::Ended(Reason::new("boot_failed", why))));
            } else {
                world.machines.insert(spec.id.clone(), Arc::clone(&guest));
            }
            orders
        };
        let boots = guest.end.borrow().is_none();
        if boots && !orders.silent {
            tokio::spawn(announce(self.announcements.clone(), guest));
        }
        drop(booted_keep);
        Ok(Machine::new(ended, booted, nobody()))
    }

    async fn find(&self, id: &SandboxId) -> Result<Option<Machine>, MachineError> {
        let guest = lock(&self.world).machines.get(id).cloned();
        let booted = watch::channel(None).1;
        Ok(guest.map(|guest| Machine::new(guest.end.subscribe(), booted, nobody())))
    }

    async fn release(&self, id: &SandboxId, scope: Scope) -> Result<(), MachineError> {
        {
            let mut world = lock(&self.world);
            if world.orders.releases_fail > 0 {
                world.orders.releases_fail -= 1;
                return Err(MachineError::Refused("told to fail".to_owned()));
            }
            if let Some(guest) = world.machines.remove(id) {
                guest.die("stopped");
            }
            world.prepared.remove(id);
        }
        if scope == Scope::Everything {
            let _ = std::fs::remove_dir_all(self.data_dir.join("sandboxes").join(id.as_str()));
        }
        Ok(())
    }

    async fn survey(&self) -> Result<BTreeSet<SandboxId>, MachineError> {
        Ok(self.held())
    }

    async fn connect(&self, cid: u32) -> io::Result<BoxChannel> {
        let guest = lock(&self.world).machines.values().find(|guest| guest.cid == cid).cloned();
        let guest = guest.filter(|guest| guest.end.borrow().is_none());
        let guest = guest.ok_or(io::ErrorKind::ConnectionRefused)?;
        let (host, ours) = tokio::io::duplex(1 << 16);
        let mut connections = guest.connections.subscribe();
        tokio::spawn(async move {
            tokio::select! {
                _ = guest.serve(ours) => {}
                _ = connections.changed() => {}
            }
        });
        Ok(Box::new(host))
    }

    fn disk_sizes(&self) -> Vec<u32> {
        vec![256, 1024, 2048]
    }

    fn memory_mib(&self) -> u64 {
        16_384
    }
}

type Served = Result<(), bivouac_protocol::frame::FrameError>;

impl Guest {
    /// The machine is gone, at once.
    pub fn die(&self, code: &str) {
        self.end.send_replace(Some(MachineEnd::Ended(Reason::new(code, "told to die"))));
        self.drop_connections();
    }

    pub fn drop_connections(&self) {
        self.connections.send_modify(|n| *n += 1);
    }

    /// Ends the commands that wait to be told.
    pub fn finish(&self, code: u8) {
        for run in lock(&self.commands).values() {
            run.send_modify(|run| {
                if run.ended.is_none() {
                    run.stdout.extend(b"after\n");
                    run.ended = Some(Outcome::Exited { code });
                }
            });
        }
    }

    pub fn started(&self, argv: &str) -> u32 {
        lock(&self.starts).get(argv).copied().unwrap_or(0)
    }

    async fn serve(&self, mut channel: tokio::io::DuplexStream) -> Served {
        let open: Open = wire::receive(&mut channel).await?;
        let reply = match open.request {
            Request::Ping => {
                Reply::Pong { version: VERSION, boot_id: self.boot_id.clone(), configured: true }
            }
            Request::Start(start) => return self.start(channel, start).await,
            Request::Attach { command_id, stdout_offset, stderr_offset } => {
                let run = lock(&self.commands).get(&command_id).cloned();
                match run {
                    None => Reply::Refused(Refusal::UnknownCommand),
                    Some(run) => {
                        return self.follow(channel, command_id, run, stdout_offset, stderr_offset).await;
                    }
                }
            }
            Request::Cancel { command_id } => {
                let run = lock(&self.commands).get(&command_id).cloned();
                match run {
                    None => Reply::Refused(Refusal::UnknownCommand),
                    Some(run) => {
                        run.send_modify(|run| run.ended = Some(Outcome::Canceled { killed: false }));
                        Reply::Done
                    }
                }
            }
            Request::Signal { command_id, signal } => {
                let run = lock(&self.commands).get(&command_id).cloned();
                if let Some(run) = run {
                    let outcome = Outcome::Signaled { signal, oom_killed: false };
                    run.send_modify(|run| run.ended = Some(outcome));
                }
                Reply::Done
            }
            Request::WriteFile { path, .. } => return self.write_file(channel, path).await,
            Request::ReadFile { path, .. } => return self.read_file(channel, path).await,
            Request::Configure(configure) => {
                *lock(&self.configured) = Some(configure);
                Reply::Configured
            }
            Request::Shutdown => Reply::Done,
        };
        wire::send(&mut channel, &reply).await
    }

    async fn start(&self, mut channel: tokio::io::DuplexStream, start: StartCommand) -> Served {
        let mut stdin = Vec::new();
        while let More::Stdin(data) = wire::receive(&mut channel).await? {
            stdin.extend(data);
        }
        let fresh = {
            let mut commands = lock(&self.commands);
            let fresh = !commands.contains_key(&start.command_id);
            fresh.then(|| {
                let run = Arc::new(watch::Sender::new(behave(&start, &stdin)));
                commands.insert(start.command_id.clone(), Arc::clone(&run));
                run
            })
        };
        let Some(run) = fresh else {
            return wire::send(&mut channel, &Reply::Refused(Refusal::Duplicate)).await;
        };
        *lock(&self.starts).entry(start.argv.join(" ")).or_default() += 1;
        let failed = matches!(run.borrow().ended, Some(Outcome::StartFailed(_)));
        if !failed {
            wire::send(&mut channel, &Reply::Started { pid: 7 }).await?;
        }
        if let Some(ms) = start.timeout_ms.filter(|_| start.argv.first().is_some_and(|a| a == "sleep")) {
            let run = Arc::clone(&run);
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(ms)).await;
                run.send_modify(|run| {
                    run.ended.get_or_insert(Outcome::TimedOut { killed: false });
                });
            });
        }
        self.follow(channel, start.command_id, run, 0, 0).await
    }

    async fn follow(
        &self,
        mut channel: tokio::io::DuplexStream,
        id: String,
        run: Arc<watch::Sender<Run>>,
        stdout: u64,
        stderr: u64,
    ) -> Served {
        let mut at = [usize::try_from(stdout).unwrap(), usize::try_from(stderr).unwrap()];
        let mut changes = run.subscribe();
        loop {
            let now = changes.borrow_and_update().clone();
            for (i, (stream, bytes)) in
                [(Stream::Stdout, &now.stdout), (Stream::Stderr, &now.stderr)].into_iter().enumerate()
            {
                while at[i] < bytes.len() {
                    let end = bytes.len().min(at[i] + 50_000);
                    let data = bytes[at[i]..end].to_vec();
                    let output = Reply::Output { stream, offset: at[i] as u64, data };
                    wire::send(&mut channel, &output).await?;
                    at[i] = end;
                }
            }
            if let Some(outcome) = now.ended {
                let ended = Ended {
                    outcome,
                    stdout_bytes: now.stdout.len() as u64,
                    stderr_bytes: now.stderr.len() as u64,
                    wall_us: 1_500,
                    user_us: 10,
                    system_us: 20,
                    max_rss_kib: 30,
                    limits_hit: now.limits_hit,
                };
                wire::send(&mut channel, &Reply::Ended(ended)).await?;
                while !matches!(wire::receive(&mut channel).await?, More::Release) {}
                lock(&self.released).push(id);
                return Ok(());
            }
            if changes.changed().await.is_err() {
                return Ok(());
            }
        }
    }

    async fn write_file(&self, mut channel: tokio::io::DuplexStream, path: String) -> Served {
        if path == "/full" {
            let refusal = Refusal::File { errno: 28, detail: "no space left on device".to_owned() };
            return wire::send(&mut channel, &Reply::Refused(refusal)).await;
        }
        let mut content = Vec::new();
        while let More::Chunk(data) = wire::receive(&mut channel).await? {
            content.extend(data);
        }
        lock(&self.files).insert(path, content);
        wire::send(&mut channel, &Reply::Done).await
    }

    async fn read_file(&self, mut channel: tokio::io::DuplexStream, path: String) -> Served {
        if path.starts_with("/dev/") {
            let refusal = Refusal::NotRegular { detail: "it is a device, not a regular file".to_owned() };
            return wire::send(&mut channel, &Reply::Refused(refusal)).await;
        }
        let content = lock(&self.files).get(&path).cloned();
        let Some(content) = content else {
            let refusal = Refusal::File { errno: 2, detail: "no such file or directory".to_owned() };
            return wire::send(&mut channel, &Reply::Refused(refusal)).await;
        };
        let info = FileInfo { size: content.len() as u64, mode: 0o100_644, uid: 1, gid: 1, modified: 0 };
        wire::send(&mut channel, &Reply::File(info)).await?;
        for chunk in content.chunks(60_000) {
            wire::send(&mut channel, &Reply::Chunk(chunk.to_vec())).await?;
        }
        wire::send(&mut channel, &Reply::End).await
    }
}

/// What a program does, by its name.
fn behave(start: &StartCommand, stdin: &[u8]) -> Run {
    let argv: Vec<&str> = start.argv.iter().map(String::as_str).collect();
    let exited = |code| Some(Outcome::Exited { code });
    match argv.as_slice() {
        ["echo", words @ ..] => {
            Run { stdout: format!("{}\n", words.join(" ")).into(), ended: exited(0), ..Run::default() }
        }
        ["cat"] => Run { stdout: stdin.to_vec(), ended: exited(0), ..Run::default() },
        ["exit", code] => Run { ended: exited(code.parse().unwrap()), ..Run::default() },
        ["both"] => {
            Run { stdout: b"out".to_vec(), stderr: b"err".to_vec(), ended: exited(0), ..Run::default() }
        }
        ["binary"] => Run { stdout: vec![0xff, 0, 0xfe], ended: exited(0), ..Run::default() },
        ["bytes", n] => {
            let stdout =
                (0..n.parse::<u32>().unwrap()).map(|i| b'a' + u8::try_from(i % 26).unwrap()).collect();
            Run { stdout, ended: exited(0), ..Run::default() }
        }
        ["oom"] => Run {
            ended: Some(Outcome::Signaled { signal: 9, oom_killed: true }),
            limits_hit: vec![Limit::Memory],
            ..Run::default()
        },
        ["fork"] => Run { ended: exited(2), limits_hit: vec![Limit::Pids], ..Run::default() },
        ["sleep" | "wait", ..] => Run { stdout: b"before\n".to_vec(), ..Run::default() },
        _ => Run {
            ended: Some(Outcome::StartFailed(StartFailure {
                kind: StartFailureKind::NotFound,
                detail: format!("{}: no such program", argv.first().unwrap_or(&"")),
            })),
            ..Run::default()
        },
    }
}

/// A monitor that is never asked anything.
fn nobody() -> tokio::sync::mpsc::Sender<super::monitor::Ask> {
    tokio::sync::mpsc::channel(1).0
}
