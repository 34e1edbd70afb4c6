//! Announces the sandbox and serves the daemon's connections, one operation each.

use crate::{
    channel,
    command::{Command, Commands},
    files,
    identity::{self, Identity},
    init::{self, Error, Settings},
};
use bivouac_protocol::{
    agent::{
        AGENT_PORT, Hello, More, Open, Refusal, Reply, Request, STDIN_MAX, StartCommand, Stream, VERSION,
    },
    frame::FrameError,
};
use rustix::fs::{MemfdFlags, Mode, OFlags};
use std::{
    cell::RefCell,
    convert::Infallible,
    fs,
    io::Write,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, split},
    sync::Notify,
    task::spawn_local,
};
use tokio_vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockAddr, VsockListener, VsockStream};

struct Agent {
    boot_id: String,
    /// None until the daemon has said who this sandbox is: nothing is admitted before.
    identity: RefCell<Option<Identity>>,
    commands: Rc<Commands>,
    /// Told when every connection has been cut at once: this is a clone of the machine that they were made to.
    reset: Notify,
}

pub async fn run(settings: Settings) -> Result<Infallible, Error> {
    let boot_id =
        fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(Error::io("read the boot id"))?;
    let agent = Rc::new(Agent {
        boot_id: boot_id.trim().to_owned(),
        identity: RefCell::new(None),
        commands: Rc::new(Commands::default()),
        reset: Notify::new(),
    });
    let commands = agent.commands.clone();
    let sweeper = commands.clone();
    spawn_local(commands.reaper.clone().run(move || sweeper.sweep()));

    // Listening comes before the announcement: whoever hears it may connect at once.
    let address = VsockAddr::new(VMADDR_CID_ANY, AGENT_PORT);
    let listener = VsockListener::bind(address).map_err(Error::io("listen on vsock"))?;
    channel::widen(&listener).map_err(Error::io("widen the vsock window"))?;
    spawn_local(announce(agent.clone(), settings.port));
    loop {
        match listener.accept().await {
            // A process in the guest cannot speak for the host.
            Ok((stream, peer)) if peer.cid() == VMADDR_CID_HOST => {
                let agent = agent.clone();
                spawn_local(async move {
                    tokio::select! {
                        served = serve(&agent, stream) => if let Err(e) = served {
                            eprintln!("bivouac-agent: {e}");
                        },
                        () = agent.reset.notified() => {}
                    }
                });
            }
            Ok(_) => {}
            // Out of descriptors, or a peer that was gone at once: neither is a reason to stop listening.
            Err(e) => {
                eprintln!("bivouac-agent: accept: {e}");
                tokio::task::yield_now().await;
            }
        }
    }
}

/// Waits between two attempts to announce: the first, and the longest.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Announces the sandbox: the agent's first act, and again whenever the connection that it was announced on is gone.
///
/// That connection is how a clone of this machine learns that it is one: the host cuts every connection of a machine
/// that is taken up, and the agent says at once where it now is. It also outlives a daemon that restarts, whose
/// successor may be slow to listen.
async fn announce(agent: Rc<Agent>, port: u32) {
    let mut pause = PAUSE;
    loop {
        match introduce(&agent, port).await {
            // It was heard, and what ended it may mean that this is another machine now.
            Ok(()) => pause = PAUSE,
            Err(e) => {
                eprintln!("bivouac-agent: announcement: {e}");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}

/// Says hello and serves the connection. Ok: it was configured over it, and it has ended since.
async fn introduce(agent: &Agent, port: u32) -> Result<(), FrameError> {
    let mut stream = VsockStream::connect(VsockAddr::new(VMADDR_CID_HOST, port)).await?;
    let hello = Hello { version: VERSION, boot_id: agent.boot_id.clone(), uptime_us: uptime_us() };
    channel::write(&mut stream, &hello).await?;
    let reset = channel::reset(stream.as_fd())?;
    tokio::pin!(reset);
    let mut heard = false;
    loop {
        let read = tokio::select! {
            read = channel::read(&mut stream) => read,
            () = &mut reset => {
                agent.reset.notify_waiters();
                return Ok(());
            }
        };
        match read {
            Ok(configure) => {
                let reply = agent.configure(configure);
                channel::write(&mut stream, &reply).await?;
                heard = true;
            }
            Err(_) if heard => return Ok(()),
            Err(e) => return Err(e),
        }
    }
}

fn uptime_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    u64::try_from(now.tv_sec).unwrap_or(0).saturating_mul(1_000_000)
        + u64::try_from(now.tv_nsec).unwrap_or(0) / 1_000
}

impl Agent {
    fn configure(&self, configure: bivouac_protocol::agent::Configure) -> Reply {
        match identity::assume(configure) {
            Ok(identity) => {
                self.identity.replace(Some(identity));
                Reply::Configured
            }
            Err(e) => Reply::Refused(Refusal::Invalid { detail: e.to_string() }),
        }
    }

    fn identity(&self) -> Result<Identity, Refusal> {
        self.identity.borrow().clone().ok_or(Refusal::NotConfigured)
    }
}

async fn serve(agent: &Rc<Agent>, mut stream: VsockStream) -> Result<(), FrameError> {
    let open: Open = channel::read(&mut stream).await?;
    if open.version != VERSION {
        return channel::write(&mut stream, &Reply::Refused(Refusal::Version { agent: VERSION })).await;
    }
    let reply = match open.request {
        Request::Ping => Reply::Pong {
            version: VERSION,
            boot_id: agent.boot_id.clone(),
            configured: agent.identity.borrow().is_some(),
        },
        Request::Configure(configure) => agent.configure(configure),
        Request::Start(start) => return run_command(agent, stream, start).await,
        Request::Attach { command_id, stdout_offset, stderr_offset } => {
            match agent.commands.table.find(&command_id) {
                Ok(command) => {
                    return follow(agent, stream, &command_id, command, stdout_offset, stderr_offset).await;
                }
                Err(refusal) => Reply::Refused(refusal),
            }
        }
        Request::Signal { command_id, signal } => done(agent.signal(&command_id, signal)),
        Request::Cancel { command_id } => {
            done(agent.commands.table.find(&command_id).map(|command| command.cancel.notify_one()))
        }
        Request::ReadFile { path, user } => match agent.identity() {
            Ok(identity) => {
                return files::send(stream, identity.resolve(&path), user.unwrap_or(identity.user)).await;
            }
            Err(refusal) => Reply::Refused(refusal),
        },
        Request::WriteFile { path, user, mode } => match agent.identity() {
            Ok(identity) => {
                let path = identity.resolve(&path);
                return files::receive(stream, path, user.unwrap_or(identity.user), mode).await;
            }
            Err(refusal) => Reply::Refused(refusal),
        },
        Request::Shutdown => {
            let _ = channel::write(&mut stream, &Reply::Done).await;
            init::power_off()
        }
    };
    channel::write(&mut stream, &reply).await
}

fn done(result: Result<(), Refusal>) -> Reply {
    result.map_or_else(Reply::Refused, |()| Reply::Done)
}

impl Agent {
    fn signal(&self, command_id: &str, signal: i32) -> Result<(), Refusal> {
        let command = self.commands.table.find(command_id)?;
        if command.look(|streams| streams.ended.is_some()) {
            // Its process group may be somebody else's by now.
            return Ok(());
        }
        // SAFETY: takes numbers only. The leader is not reaped yet, or its group still has its number.
        if unsafe { libc::kill(-command.pid, signal) } < 0 {
            let why = std::io::Error::last_os_error();
            return match why.raw_os_error() {
                Some(libc::ESRCH) => Ok(()),
                _ => Err(Refusal::Invalid { detail: format!("signal {signal}: {why}") }),
            };
        }
        Ok(())
    }
}

async fn run_command(
    agent: &Rc<Agent>,
    mut stream: VsockStream,
    start: StartCommand,
) -> Result<(), FrameError> {
    let stdin = match stdin(&mut stream).await? {
        Ok(stdin) => stdin,
        Err(refusal) => return channel::write(&mut stream, &Reply::Refused(refusal)).await,
    };
    let started = agent.identity().and_then(|identity| agent.commands.start(&identity, &start, &stdin));
    let command = match started {
        Ok(command) => command,
        Err(refusal) => return channel::write(&mut stream, &Reply::Refused(refusal)).await,
    };
    if let Ok(pid @ 1..) = u32::try_from(command.pid) {
        channel::write(&mut stream, &Reply::Started { pid }).await?;
    }
    follow(agent, stream, &start.command_id, command, 0, 0).await
}

/// Collects all of standard input, and gives it as a file that ends.
async fn stdin(stream: &mut VsockStream) -> Result<Result<OwnedFd, Refusal>, FrameError> {
    let mut bytes = Vec::new();
    loop {
        match channel::read(stream).await? {
            More::Stdin(chunk) if bytes.len().saturating_add(chunk.len()) <= STDIN_MAX => bytes.extend(chunk),
            More::StdinEnd => break,
            other => {
                let detail = match other {
                    More::Stdin(_) => format!("standard input is above {STDIN_MAX} bytes"),
                    _ => "expected standard input".to_owned(),
                };
                return Ok(Err(Refusal::Invalid { detail }));
            }
        }
    }
    let made = if bytes.is_empty() { empty_input() } else { input_of(&bytes) };
    Ok(made.map_err(|e| Refusal::Busy { detail: format!("standard input: {e}") }))
}

fn empty_input() -> std::io::Result<OwnedFd> {
    Ok(rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

fn input_of(bytes: &[u8]) -> std::io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create("stdin", MemfdFlags::CLOEXEC)?;
    let mut file = fs::File::from(memory);
    file.write_all(bytes)?;
    // Opened anew, so that it is read from its start and cannot be written, whichever user reads it.
    rustix::fs::fchmod(&file, Mode::RUSR | Mode::RGRP | Mode::ROTH)?;
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Sends what the command writes, from the given offsets on, and its end. The daemon's side of the conversation
/// (acknowledgements, release) is read at the same time.
async fn follow(
    agent: &Rc<Agent>,
    stream: VsockStream,
    id: &str,
    command: Rc<Command>,
    stdout_offset: u64,
    stderr_offset: u64,
) -> Result<(), FrameError> {
    let (reader, writer) = split(stream);
    let sending =
        send_output(&command, writer, [(Stream::Stdout, stdout_offset), (Stream::Stderr, stderr_offset)]);
    let listening = obey(agent, &command, id, reader);
    // When the daemon hangs up there is nobody to send to; when everything is sent, it still has to release.
    tokio::pin!(listening);
    tokio::select! {
        sent = sending => {
            sent?;
            listening.await
        }
        heard = &mut listening => heard,
    }
}

async fn send_output(
    command: &Command,
    mut to: impl AsyncWrite + Unpin,
    mut cursors: [(Stream, u64); 2],
) -> Result<(), FrameError> {
    let mut changes = command.changes();
    loop {
        let mut idle = true;
        for (stream, cursor) in &mut cursors {
            let (offset, data) = command.look(|streams| streams.spool_ref(*stream).read(*cursor));
            if !data.is_empty() {
                idle = false;
                *cursor = offset.saturating_add(data.len() as u64);
                channel::write(&mut to, &Reply::Output { stream: *stream, offset, data }).await?;
            }
        }
        if !idle {
            continue;
        }
        // Everything is sent that was there; an end that is set now came after the last byte.
        if let Some(ended) = command.look(|streams| streams.ended.clone()) {
            return channel::write(&mut to, &Reply::Ended(ended)).await;
        }
        let _ = changes.changed().await;
    }
}

async fn obey(
    agent: &Rc<Agent>,
    command: &Command,
    id: &str,
    mut from: impl AsyncRead + Unpin,
) -> Result<(), FrameError> {
    loop {
        match channel::read(&mut from).await {
            Ok(More::Ack { stdout, stderr }) => command.change(|streams| {
                streams.spool(Stream::Stdout).acknowledge(stdout);
                streams.spool(Stream::Stderr).acknowledge(stderr);
            }),
            Ok(More::Release) => {
                agent.commands.table.release(id);
                return Ok(());
            }
            Ok(_) => {}
            Err(FrameError::Closed) => return Ok(()),
            Err(e) => return Err(e),
        }
    }
}
