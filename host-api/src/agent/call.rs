//! Calls to an agent: one connection each, and each with a deadline.

use super::wire;
use crate::limits;
use crate::machine::{BoxChannel, Machines};
use bivouac_protocol::agent::{Configure, Hello, Open, Refusal, Reply, Request, VERSION};
use bivouac_protocol::frame::FrameError;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("the guest could not be reached: {0}")]
    Connect(io::Error),
    #[error("the connection to the guest broke: {0}")]
    Frame(#[from] FrameError),
    #[error("the guest did not answer within {} s", .0.as_secs())]
    Timeout(Duration),
    #[error("the guest refused: {0:?}")]
    Refused(Refusal),
    #[error("the guest answered what was not asked: {0}")]
    Protocol(String),
}

/// Reaches agents by CID.
#[derive(Clone)]
pub struct Agents {
    machines: Arc<dyn Machines>,
}

impl std::fmt::Debug for Agents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Agents")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pong {
    pub boot_id: String,
    pub configured: bool,
}

async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, AgentError>>,
) -> Result<T, AgentError> {
    timeout(limit, work).await.unwrap_or(Err(AgentError::Timeout(limit)))
}

impl Agents {
    pub fn new(machines: Arc<dyn Machines>) -> Self {
        Self { machines }
    }

    /// Opens an operation's connection and sends its first frame.
    pub async fn open(&self, cid: u32, request: Request) -> Result<BoxChannel, AgentError> {
        within(limits::CONNECT, async {
            let mut channel = self.machines.connect(cid).await.map_err(AgentError::Connect)?;
            wire::send(&mut channel, &Open { version: VERSION, request }).await?;
            Ok(channel)
        })
        .await
    }

    /// A request with one answer.
    async fn ask(&self, cid: u32, request: Request) -> Result<Reply, AgentError> {
        let mut channel = self.open(cid, request).await?;
        let reply = within(limits::ANSWER, async { Ok(wire::receive(&mut channel).await?) }).await?;
        match reply {
            Reply::Refused(refusal) => Err(AgentError::Refused(refusal)),
            reply => Ok(reply),
        }
    }

    pub async fn ping(&self, cid: u32) -> Result<Pong, AgentError> {
        match self.ask(cid, Request::Ping).await? {
            Reply::Pong { version: VERSION, boot_id, configured } => Ok(Pong { boot_id, configured }),
            other => Err(unexpected(&other)),
        }
    }

    pub async fn signal(&self, cid: u32, command_id: &str, signal: i32) -> Result<(), AgentError> {
        self.done(cid, Request::Signal { command_id: command_id.to_owned(), signal }).await
    }

    pub async fn cancel(&self, cid: u32, command_id: &str) -> Result<(), AgentError> {
        self.done(cid, Request::Cancel { command_id: command_id.to_owned() }).await
    }

    async fn done(&self, cid: u32, request: Request) -> Result<(), AgentError> {
        match self.ask(cid, request).await? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }
}

/// Takes a guest's first words on its announcement, and makes it the sandbox it is to be.
pub async fn configure(
    channel: &mut BoxChannel,
    what: impl FnOnce() -> Configure,
) -> Result<Hello, AgentError> {
    within(limits::CONFIGURE, async {
        let hello: Hello = wire::receive(channel).await?;
        if hello.version != VERSION {
            return Err(AgentError::Refused(Refusal::Version { agent: hello.version }));
        }
        // Made now and not before: it carries the time.
        wire::send(channel, &what()).await?;
        match wire::receive(channel).await? {
            Reply::Configured => Ok(hello),
            Reply::Refused(refusal) => Err(AgentError::Refused(refusal)),
            other => Err(unexpected(&other)),
        }
    })
    .await
}

/// Names a reply without its contents, which a guest chooses.
pub(super) fn unexpected(reply: &Reply) -> AgentError {
    let name = match reply {
        Reply::Pong { .. } => "Pong",
        Reply::Configured => "Configured",
        Reply::Done => "Done",
        Reply::Refused(_) => "Refused",
        Reply::Started { .. } => "Started",
        Reply::Output { .. } => "Output",
        Reply::Ended(_) => "Ended",
        Reply::File(_) => "File",
        Reply::Chunk(_) => "Chunk",
        Reply::End => "End",
    };
    AgentError::Protocol(name.to_owned())
}
