//! The agent in a guest, as its daemon sees it: heard, configured, asked to run commands.

use anyhow::{Context, Result, bail};
use bivouac_protocol::agent::{
    AGENT_PORT, Configure, Hello, More, Open, Outcome, Reply, Request, StartCommand, VERSION,
};
use bivouacd::{
    agent::{self, Announcements, Expected, wire},
    machine::BoxChannel,
};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener, VsockStream};

/// Longer than any of this takes, and an error instead of a hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// The listener that guests announce themselves to.
pub struct Announced {
    pub port: u32,
    announcements: Announcements,
}

impl Announced {
    pub fn listen() -> Result<Self> {
        let listener = VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, u32::MAX))
            .context("cannot listen on vsock; is the module vhost_vsock loaded?")?;
        let port = listener.local_addr()?.port();
        let announcements = Announcements::default();
        tokio::spawn(agent::listen(listener, announcements.clone()));
        Ok(Self { port, announcements })
    }

    /// To be called before the guest starts.
    pub fn expect(&self, cid: u32) -> Expected {
        self.announcements.expect(cid)
    }

    /// Waits for the guest's first word.
    pub async fn hello(&self, expected: &mut Expected) -> Result<Heard> {
        let hello = async {
            let mut channel = expected.arrival().await.context("the announcement was lost")?;
            let hello: Hello = wire::receive(&mut channel).await?;
            let heard = Instant::now();
            if hello.version != VERSION {
                bail!("the agent speaks version {}", hello.version);
            }
            Ok(Heard { at: heard, uptime_ms: hello.uptime_us as f64 / 1000.0, channel })
        };
        tokio::time::timeout(PATIENCE, hello).await.context("the guest did not announce itself")?
    }

    /// Makes the guest a sandbox. The connection is kept, as the daemon keeps it.
    pub async fn configure(&self, cid: u32, mut channel: BoxChannel) -> Result<()> {
        wire::send(&mut channel, &configuration(cid)?).await?;
        match wire::receive(&mut channel).await? {
            Reply::Configured => {}
            other => bail!("not configured: {other:?}"),
        }
        self.announcements.keep(cid, channel);
        Ok(())
    }
}

/// A guest's first word.
pub struct Heard {
    pub at: Instant,
    /// By the guest's clock, from its kernel's start.
    pub uptime_ms: f64,
    pub channel: BoxChannel,
}

pub fn configuration(cid: u32) -> Result<Configure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(Configure {
        hostname: format!("guest-{cid}"),
        entropy: bivouacd::auth::entropy(),
        unix_time_ns: u64::try_from(now.as_nanos())?,
        env: vec![("PATH".to_owned(), "/usr/bin:/bin:/usr/sbin:/sbin".to_owned())],
        user: "root".to_owned(),
        workdir: "/".to_owned(),
    })
}

/// What a command left.
pub struct Done {
    pub stdout: Vec<u8>,
}

/// Runs a command by vsock, as the daemon does, and returns when its end was read.
pub async fn exec(cid: u32, id: &str, argv: &[&str]) -> Result<Done> {
    let mut channel = VsockStream::connect(VsockAddr::new(cid, AGENT_PORT)).await?;
    run(&mut channel, id, argv).await
}

pub async fn run(
    channel: &mut (impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin),
    id: &str,
    argv: &[&str],
) -> Result<Done> {
    let start = StartCommand {
        command_id: id.to_owned(),
        argv: argv.iter().map(|&argument| argument.to_owned()).collect(),
        cwd: None,
        env: Vec::new(),
        user: None,
        timeout_ms: None,
    };
    wire::send(channel, &Open { version: VERSION, request: Request::Start(start) }).await?;
    wire::send(channel, &More::StdinEnd).await?;
    let mut stdout = Vec::new();
    loop {
        match wire::receive(channel).await? {
            Reply::Started { .. } => {}
            Reply::Output { data, .. } => stdout.extend(data),
            Reply::Ended(ended) => match ended.outcome {
                Outcome::Exited { code: 0 } => return Ok(Done { stdout }),
                other => bail!("{argv:?} ended as {other:?}"),
            },
            other => bail!("{argv:?}: {other:?}"),
        }
    }
}
