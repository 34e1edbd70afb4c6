//! Machines under test: made, heard, configured and asked as the daemon does it, and gone when they go out of scope.
//!
//! Everything here blocks, so that a test reads from top to bottom. Where something is waited for, it is for an event, and
//! the patience below only turns a hang into an error.

use bivouac_protocol::{
    agent::{Configure, Ended, More, Outcome, PORT_PARAMETER, Reply, Request, StartCommand, Stream},
    frame::FrameError,
    monitor::{FromMonitor, ToMonitor},
};
use bivouac_tests::host::prefix;
use bivouacd::{
    agent::{self, Agents, Announcements, wire},
    auth,
    ids::SandboxId,
    lifecycle::{Reason, Scope},
    machine::{
        BoxChannel, Machine, MachineError, MachineSpec, Machines, SavedMachine,
        real::{RealMachines, Settings},
    },
};
use std::{
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::{runtime::Runtime, time::timeout};
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener};

/// Longer than anything here takes, in a lab on a busy machine too.
pub const PATIENCE: Duration = Duration::from_secs(180);

pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    })
}

/// Waits for an event that has to come.
pub fn wait<T>(what: &str, event: impl Future<Output = T>) -> T {
    runtime().block_on(async { timeout(PATIENCE, event).await }).unwrap_or_else(|_| panic!("in vain: {what}"))
}

/// Held by tests that need much of the host, so that there is one of them at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Where guests announce themselves: the port, and who is expected.
fn announced() -> &'static (u32, Announcements) {
    static ANNOUNCED: OnceLock<(u32, Announcements)> = OnceLock::new();
    ANNOUNCED.get_or_init(|| {
        runtime().block_on(async {
            let listener = VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, u32::MAX)).unwrap();
            let port = listener.local_addr().unwrap().port();
            let announcements = Announcements::default();
            tokio::spawn(agent::listen(listener, announcements.clone()));
            (port, announcements)
        })
    })
}

fn number() -> u32 {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// A guest address that nothing else on this host has.
fn cid() -> u32 {
    0x1000_0000 + (std::process::id() % 0x1_0000) * 0x1000 + number()
}

/// A host's folders, as a daemon has them.
pub struct World {
    pub machines: RealMachines,
    pub instance: String,
    folder: tempfile::TempDir,
}

/// What a machine is to be.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub template: &'static str,
    pub vcpus: u8,
    pub memory_mib: u32,
}

/// The smallest there is.
pub const SMALL: Shape = Shape { template: "base", vcpus: 1, memory_mib: 64 };

impl World {
    pub fn new() -> Arc<Self> {
        let parent = Path::new("/var/lib/bivouac");
        fs::create_dir_all(parent).expect("the tests run as root");
        let folder = tempfile::Builder::new().prefix("monitor-").tempdir_in(parent).unwrap();
        let instance = format!("monitor-{}-{}", std::process::id(), number());
        let machines = machines(folder.path(), &instance);
        Arc::new(Self { machines, instance, folder })
    }

    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// A path for a snapshot.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn spec(&self, shape: Shape, saved: Option<SavedMachine>) -> MachineSpec {
        MachineSpec {
            id: SandboxId::new(),
            vcpus: shape.vcpus,
            memory_mib: shape.memory_mib,
            disk_mib: 1024,
            cid: cid(),
            root: prefix().join("templates").join(shape.template).join("rootfs.erofs"),
            saved,
            cmdline: format!("{PORT_PARAMETER}={}", announced().0),
        }
    }

    /// Starts a machine and leaves it to itself.
    pub fn launch(self: &Arc<Self>, spec: &MachineSpec) -> Result<Guest, MachineError> {
        let machine = wait("a machine is launched", async {
            self.machines.prepare(spec).await?;
            self.machines.launch(spec).await
        });
        match machine {
            Ok(machine) => Ok(Guest {
                id: spec.id.clone(),
                cid: spec.cid,
                machine,
                configured_in: Duration::ZERO,
                world: Arc::clone(self),
                commands: AtomicU32::new(0),
            }),
            Err(why) => {
                wait("a release", self.machines.release(&spec.id, Scope::Everything)).unwrap();
                Err(why)
            }
        }
    }

    /// Starts a machine and waits until it is a sandbox that commands can be run in.
    fn bring_up(self: &Arc<Self>, spec: &MachineSpec) -> Guest {
        let (_, announcements) = announced();
        let mut expected = announcements.expect(spec.cid);
        let mut guest = self.launch(spec).unwrap();
        let heard = wait("a guest's announcement", async {
            tokio::select! {
                heard = expected.arrival() => Ok(heard.expect("nobody else waits for it")),
                end = guest.machine.ended() => Err(end),
            }
        });
        let mut channel = heard.unwrap_or_else(|end| panic!("it ended: {end:?}\n{}", guest.log()));
        let begun = Instant::now();
        let configured = wait("a guest is configured", agent::configure(&mut channel, || guest.identity()));
        configured.unwrap_or_else(|e| panic!("{e}\n{}", guest.log()));
        guest.configured_in = begun.elapsed();
        runtime().block_on(async { announcements.keep(spec.cid, channel) });
        guest
    }

    pub fn boot(self: &Arc<Self>, shape: Shape) -> Guest {
        self.bring_up(&self.spec(shape, None))
    }

    /// A machine of `shape` that goes on where the one in `folder` was saved.
    pub fn clone_of(self: &Arc<Self>, folder: &Path, shape: Shape) -> Guest {
        self.clone_from(SavedMachine { folder: folder.to_owned(), verify: false, record: false }, shape)
    }

    pub fn clone_from(self: &Arc<Self>, saved: SavedMachine, shape: Shape) -> Guest {
        self.bring_up(&self.spec(shape, Some(saved)))
    }
}

/// What a daemon with these folders works with.
pub fn machines(folder: &Path, instance: &str) -> RealMachines {
    let settings = Settings {
        data_dir: folder.join("data"),
        prefix: prefix(),
        instance: instance.to_owned(),
        console: std::env::var_os("BIVOUAC_TEST_CONSOLE").is_some(),
    };
    RealMachines::new(settings).unwrap()
}

/// A machine, and its agent.
pub struct Guest {
    pub id: SandboxId,
    pub cid: u32,
    pub machine: Machine,
    /// From telling it who it is, and what time, to its answer.
    pub configured_in: Duration,
    world: Arc<World>,
    commands: AtomicU32,
}

impl Guest {
    pub fn hostname(&self) -> String {
        format!("guest-{}", self.cid)
    }

    fn identity(&self) -> Configure {
        Configure {
            hostname: self.hostname(),
            entropy: auth::entropy(),
            unix_time_ns: u64::try_from(now().as_nanos()).unwrap(),
            env: vec![("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin".to_owned())],
            user: "root".to_owned(),
            workdir: "/".to_owned(),
        }
    }

    pub fn ask(&self, what: ToMonitor) -> Result<FromMonitor, MachineError> {
        self.ask_with(what, Vec::new())
    }

    pub fn ask_with(&self, what: ToMonitor, files: Vec<OwnedFd>) -> Result<FromMonitor, MachineError> {
        wait("a monitor's answer", self.machine.ask(what, files))
    }

    /// Saves it under `name`, as the daemon does.
    pub fn save(&self, name: &str) -> PathBuf {
        let folder = self.world.path(name);
        wait("a machine is saved", self.world.machines.save(&self.id, &self.machine, &folder))
            .unwrap_or_else(|e| panic!("{e}\n{}", self.log()));
        folder
    }

    /// Waits for its end.
    pub fn ended(&mut self) -> Reason {
        wait("a machine's end", self.machine.ended()).reason()
    }

    /// The monitor's process.
    pub fn pid(&self) -> i32 {
        let procs = fs::read_to_string(self.cgroup().join("cgroup.procs")).unwrap();
        let pids: Vec<i32> = procs.lines().map(|pid| pid.parse().unwrap()).collect();
        assert_eq!(pids.len(), 1, "one process in a sandbox's cgroup: {pids:?}\n{}", self.log());
        pids[0]
    }

    pub fn cgroup(&self) -> PathBuf {
        Path::new("/sys/fs/cgroup/bivouac").join(&self.world.instance).join(self.id.as_str())
    }

    pub fn folder(&self) -> PathBuf {
        self.world.data().join("sandboxes").join(self.id.as_str())
    }

    /// What the monitor had to say.
    pub fn log(&self) -> String {
        let path = bivouacd::machine::log_path(&self.world.data(), self.id.as_str());
        format!("the monitor's log: {}", fs::read_to_string(path).unwrap_or_default())
    }

    fn open(&self, request: Request) -> BoxChannel {
        let agents = Agents::new(Arc::new(self.world.machines.clone()));
        let open = wait("a connection to the agent", agents.open(self.cid, request));
        open.unwrap_or_else(|e| panic!("{e}\n{}", self.log()))
    }

    /// Starts a shell command and follows it.
    pub fn start(&self, script: &str) -> Running {
        let id = format!("{}-{}", self.cid, self.commands.fetch_add(1, Ordering::Relaxed));
        let start = StartCommand {
            command_id: id.clone(),
            argv: ["sh", "-c", script].map(str::to_owned).to_vec(),
            cwd: None,
            env: Vec::new(),
            user: None,
            timeout_ms: None,
        };
        let mut channel = self.open(Request::Start(start));
        wait("input is sent", wire::send(&mut channel, &More::StdinEnd)).unwrap();
        match wait("a command starts", wire::receive(&mut channel)).unwrap() {
            Reply::Started { .. } => {}
            other => panic!("{script}: {other:?}"),
        }
        Running { id, channel, stdout: Vec::new(), taken: 0, stderr: Vec::new() }
    }

    /// Follows a command that was started before, from its first byte of output on.
    pub fn attach(&self, command_id: &str) -> Running {
        let request =
            Request::Attach { command_id: command_id.to_owned(), stdout_offset: 0, stderr_offset: 0 };
        let channel = self.open(request);
        Running { id: command_id.to_owned(), channel, stdout: Vec::new(), taken: 0, stderr: Vec::new() }
    }

    /// Runs a shell command that has to succeed; returns what it printed.
    pub fn shell(&self, script: &str) -> String {
        let (ended, stdout, stderr) = self.start(script).end();
        assert_eq!(ended.outcome, Outcome::Exited { code: 0 }, "{script}: {stdout}{stderr}");
        stdout
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: {}", self.id, self.log());
        }
        let released = wait("a release", self.world.machines.release(&self.id, Scope::Everything));
        if !std::thread::panicking() {
            released.unwrap();
        }
    }
}

/// A command that is followed.
pub struct Running {
    pub id: String,
    channel: BoxChannel,
    stdout: Vec<u8>,
    /// How much of it was handed out as lines.
    taken: usize,
    stderr: Vec<u8>,
}

impl Running {
    /// Takes what comes next. Some: the command has ended. Err: the connection has.
    fn hear(&mut self) -> Result<Option<Ended>, FrameError> {
        match wait("a command's output", wire::receive(&mut self.channel))? {
            Reply::Output { stream: Stream::Stdout, data, .. } => self.stdout.extend(data),
            Reply::Output { stream: Stream::Stderr, data, .. } => self.stderr.extend(data),
            Reply::Ended(ended) => return Ok(Some(ended)),
            other => panic!("{other:?}"),
        }
        Ok(None)
    }

    /// The next line, without its end.
    pub fn line(&mut self) -> String {
        loop {
            if let Some(length) = self.stdout[self.taken..].iter().position(|byte| *byte == b'\n') {
                let line = &self.stdout[self.taken..self.taken + length];
                self.taken += length + 1;
                return String::from_utf8_lossy(line).into_owned();
            }
            let ended = self.hear().unwrap();
            assert_eq!(ended, None, "{}", String::from_utf8_lossy(&self.stderr));
        }
    }

    pub fn end(mut self) -> (Ended, String, String) {
        loop {
            if let Some(ended) = self.hear().unwrap() {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                return (ended, text(&self.stdout), text(&self.stderr));
            }
        }
    }
}

pub fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}
