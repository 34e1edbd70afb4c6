//! Files in and out, chunk by chunk: never more than a chunk in memory.

use super::call::{AgentError, unexpected};
use super::{Agents, wire};
use crate::limits;
use crate::machine::BoxChannel;
use bivouac_protocol::agent::{FileInfo, More, Reply, Request};
use bivouac_protocol::frame::MAX_CHUNK;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::time::timeout;

/// A file on its way out of a guest.
pub struct Download {
    pub info: FileInfo,
    left: u64,
    channel: BoxChannel,
}

impl std::fmt::Debug for Download {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Download({:?}, {} left)", self.info, self.left)
    }
}

impl Download {
    pub async fn open(
        agents: &Agents,
        cid: u32,
        path: &str,
        user: Option<String>,
    ) -> Result<Self, AgentError> {
        let mut channel = agents.open(cid, Request::ReadFile { path: path.to_owned(), user }).await?;
        match next(&mut channel).await? {
            Reply::File(info) => Ok(Self { left: info.size, info, channel }),
            Reply::Refused(refusal) => Err(AgentError::Refused(refusal)),
            other => Err(unexpected(&other)),
        }
    }

    /// The next bytes; None at the end. The whole is exactly as long as [`FileInfo::size`], or an error.
    pub async fn chunk(&mut self) -> Result<Option<Vec<u8>>, AgentError> {
        match next(&mut self.channel).await? {
            Reply::Chunk(data) => {
                let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
                self.left = self
                    .left
                    .checked_sub(len)
                    .ok_or_else(|| AgentError::Protocol("more bytes than the file has".to_owned()))?;
                Ok(Some(data))
            }
            Reply::End if self.left == 0 => Ok(None),
            Reply::End => Err(AgentError::Protocol(format!("the file ended {} bytes early", self.left))),
            Reply::Refused(refusal) => Err(AgentError::Refused(refusal)),
            other => Err(unexpected(&other)),
        }
    }
}

async fn next(channel: &mut BoxChannel) -> Result<Reply, AgentError> {
    match timeout(limits::STALL, wire::receive(channel)).await {
        Ok(reply) => Ok(reply?),
        Err(_) => Err(AgentError::Timeout(limits::STALL)),
    }
}

/// A file on its way into a guest. Dropped before [`Upload::finish`], the file there stays as it was.
pub struct Upload {
    out: WriteHalf<BoxChannel>,
    /// What is not sent yet. Callers send in pieces of any size; a guest's kernel resets a stream on which hundreds of
    /// small packets wait, so all but the last piece that goes out is a large one.
    pending: Vec<u8>,
    answer: Answer,
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Upload")
    }
}

/// The agent's one reply, read by a task: it may come at any time, and a read must not be broken off half way.
struct Answer(tokio::task::JoinHandle<Result<Reply, AgentError>>);

impl Drop for Answer {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn listen(mut input: ReadHalf<BoxChannel>) -> Answer {
    Answer(tokio::spawn(async move { Ok(wire::receive(&mut input).await?) }))
}

impl Upload {
    pub async fn open(
        agents: &Agents,
        cid: u32,
        path: &str,
        user: Option<String>,
        mode: Option<u32>,
    ) -> Result<Self, AgentError> {
        let request = Request::WriteFile { path: path.to_owned(), user, mode };
        let (input, out) = tokio::io::split(agents.open(cid, request).await?);
        Ok(Self { out, pending: Vec::with_capacity(MAX_CHUNK), answer: listen(input) })
    }

    pub async fn chunk(&mut self, mut data: &[u8]) -> Result<(), AgentError> {
        while !data.is_empty() {
            let room = MAX_CHUNK.saturating_sub(self.pending.len());
            let (now, later) = data.split_at_checked(room).unwrap_or((data, &[]));
            self.pending.extend_from_slice(now);
            data = later;
            if self.pending.len() >= MAX_CHUNK {
                self.flush().await?;
            }
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), AgentError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.pending, Vec::with_capacity(MAX_CHUNK));
        self.send(&More::Chunk(piece)).await
    }

    async fn send(&mut self, more: &More) -> Result<(), AgentError> {
        let sent = tokio::select! {
            biased;
            reply = &mut self.answer.0 => return Err(refused(reply)),
            sent = timeout(limits::STALL, wire::send(&mut self.out, more)) => sent,
        };
        match sent {
            Ok(Ok(())) => Ok(()),
            // The reason may be waiting: an agent that refuses hangs up.
            Ok(Err(broken)) => match timeout(limits::ANSWER, &mut self.answer.0).await {
                Ok(Ok(Ok(Reply::Refused(refusal)))) => Err(AgentError::Refused(refusal)),
                _ => Err(broken.into()),
            },
            Err(_) => Err(AgentError::Timeout(limits::STALL)),
        }
    }

    /// Puts the new file in place of the old one. It is there when this returns.
    pub async fn finish(mut self) -> Result<(), AgentError> {
        self.flush().await?;
        // Whether this could be sent does not matter: the answer says what became of the file.
        let _ = timeout(limits::STALL, wire::send(&mut self.out, &More::End)).await;
        match timeout(limits::STALL, &mut self.answer.0).await {
            Ok(Ok(Ok(Reply::Done))) => Ok(()),
            Ok(reply) => Err(refused(reply)),
            Err(_) => Err(AgentError::Timeout(limits::STALL)),
        }
    }
}

fn refused(reply: Result<Result<Reply, AgentError>, tokio::task::JoinError>) -> AgentError {
    match reply {
        Ok(Ok(Reply::Refused(refusal))) => AgentError::Refused(refusal),
        Ok(Ok(other)) => unexpected(&other),
        Ok(Err(broken)) => broken,
        Err(gone) => AgentError::Protocol(gone.to_string()),
    }
}
