//! The run of one command, from its row to its end.

use super::output::{Recorder, StreamName};
use super::{Progress, outcome};
use crate::agent::{AgentError, wire};
use crate::daemon::Daemon;
use crate::lifecycle::UnixMs;
use crate::sandboxes::Live;
use crate::store::{CommandRow, Finished};
use bivouac_protocol::agent::{Ended, More, Refusal, Reply, Request, StartCommand, Stream, WINDOW};
use bivouac_protocol::frame::{FrameError, MAX_CHUNK};
use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

const BACKOFF_FIRST: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// How often a start that the agent has no room for is tried again before that is the result.
const BUSY_ATTEMPTS: u32 = 12;
/// That a command runs is written once it has run this long: a shorter one saves the store a write.
const WORTH_WRITING: Duration = Duration::from_millis(200);
/// The agent is told when this much more is recorded: well before its window is full.
const ACK_EVERY: u64 = WINDOW / 8;
/// How long the last words to the agent may take.
const PARTING: Duration = Duration::from_secs(5);

/// How a connection begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Approach {
    Start,
    Attach,
}

enum Ending {
    Ended(Ended),
    Refused(Refusal),
}

#[derive(Debug, thiserror::Error)]
enum DriveError {
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("output could not be recorded: {0}")]
    Record(#[from] io::Error),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Acked {
    stdout: u64,
    stderr: u64,
    /// The end is recorded.
    finished: bool,
}

/// Starts a command that was just accepted.
pub(super) fn start(
    daemon: Arc<Daemon>,
    live: Arc<Live>,
    row: CommandRow,
    progress: Arc<watch::Sender<Progress>>,
) {
    tokio::spawn(drive(daemon, live, row, progress, Approach::Start));
}

/// Settles a command that an earlier daemon accepted: the agent knows whether it has run.
pub(crate) fn settle(daemon: Arc<Daemon>, live: Arc<Live>, row: CommandRow) {
    let progress =
        Arc::new(watch::Sender::new(Progress { started: row.started_at.is_some(), ..Progress::default() }));
    live.add_command(&row.id, Arc::clone(&progress));
    tokio::spawn(drive(daemon, live, row, progress, Approach::Attach));
}

async fn drive(
    daemon: Arc<Daemon>,
    live: Arc<Live>,
    row: CommandRow,
    progress: Arc<watch::Sender<Progress>>,
    approach: Approach,
) {
    let run = Run { daemon: &daemon, live: &live, row: &row, progress: &progress };
    tokio::select! {
        () = run.to_the_end(approach) => {}
        // What becomes of the command is in the transaction that made the sandbox unusable.
        () = live.unusable() => {}
    }
    live.end_command(&row.id);
    let took = daemon.clock.now().saturating_sub(row.accepted_at);
    daemon.metrics.command_ms.observe(u64::try_from(took).unwrap_or(0));
}

struct Run<'a> {
    daemon: &'a Arc<Daemon>,
    live: &'a Arc<Live>,
    row: &'a CommandRow,
    progress: &'a Arc<watch::Sender<Progress>>,
}

impl Run<'_> {
    /// Tries until there is an end, and records it. Every way to try again goes through the agent's own memory of the
    /// command, so that none of them is a second run.
    async fn to_the_end(&self, mut approach: Approach) {
        let mut wait = BACKOFF_FIRST;
        let mut busy = 0_u32;
        loop {
            let attempt = self.attempt(approach).await;
            match attempt {
                Ok(None) => return,
                Ok(Some(Refusal::UnknownCommand)) => approach = Approach::Start,
                Ok(Some(Refusal::Duplicate)) => approach = Approach::Attach,
                Ok(Some(Refusal::Released)) => {
                    let at = self.daemon.clock.now();
                    let why = "the guest has already forgotten its result";
                    return self.record(&outcome::lost("result_released", why, at)).await;
                }
                Ok(Some(Refusal::Busy { .. })) if approach == Approach::Attach || busy < BUSY_ATTEMPTS => {
                    busy = busy.saturating_add(1);
                }
                Ok(Some(refusal)) if approach == Approach::Attach => {
                    let why = format!("the guest refuses to say what became of it: {refusal:?}");
                    return self.record(&outcome::lost("refused", &why, self.daemon.clock.now())).await;
                }
                Ok(Some(refusal)) => {
                    return self.record(&outcome::not_started(&refusal, self.daemon.clock.now())).await;
                }
                Err(DriveError::Record(cause)) => {
                    // The guest keeps what was not acknowledged, and the command waits with its next output.
                    tracing::error!(command = self.row.id, %cause, "output could not be recorded; trying again");
                    approach = Approach::Attach;
                }
                Err(cause) => {
                    tracing::warn!(command = self.row.id, %cause, "connection to a command lost; taking it up again");
                    // It may have been started: ask.
                    approach = Approach::Attach;
                }
            }
            tokio::time::sleep(wait).await;
            wait = wait.saturating_mul(2).min(BACKOFF_MAX);
        }
    }

    /// One connection. None: the end is recorded.
    async fn attempt(&self, approach: Approach) -> Result<Option<Refusal>, DriveError> {
        let stdout = Recorder::open(self.daemon, self.row, StreamName::Stdout).await?;
        let stderr = Recorder::open(self.daemon, self.row, StreamName::Stderr).await?;
        let request = match approach {
            Approach::Start => Request::Start(start_command(self.row)),
            Approach::Attach => Request::Attach {
                command_id: self.row.id.clone(),
                stdout_offset: stdout.total(),
                stderr_offset: stderr.total(),
            },
        };
        let channel = self.daemon.agents.open(self.live.cid(), request).await?;
        let (input, out) = tokio::io::split(channel);
        let acked = watch::Sender::new(Acked::default());
        let stdin = (approach == Approach::Start).then(|| self.row.stdin.clone().unwrap_or_default());

        let mut speaking = pin!(speak(out, stdin, acked.subscribe()));
        let mut spoken = false;
        let mut started_at = self.row.started_at;
        let ending = {
            let mut listening = pin!(self.listen(input, &stdout, &stderr, &acked, &mut started_at));
            loop {
                tokio::select! {
                    ending = &mut listening => break ending?,
                    // A broken way out shows on the way in as well, and there may be answers on it still.
                    _ = &mut speaking, if !spoken => spoken = true,
                }
            }
        };
        let ended = match ending {
            Ending::Refused(refusal) => return Ok(Some(refusal)),
            Ending::Ended(ended) => ended,
        };
        if stdout.total() < ended.stdout_bytes || stderr.total() < ended.stderr_bytes {
            tracing::warn!(command = self.row.id, "the guest did not send all of the output it counted");
        }
        self.record(&outcome::from_ended(&ended, self.daemon.clock.now(), started_at)).await;
        acked.send_modify(|acked| acked.finished = true);
        if !spoken {
            // Whoever waits for the result need not wait for this.
            self.live.end_command(&self.row.id);
            let _ = tokio::time::timeout(PARTING, speaking).await;
        }
        Ok(None)
    }

    /// Takes what the agent sends, to the last frame.
    async fn listen(
        &self,
        mut input: impl AsyncRead + Unpin,
        stdout: &Recorder,
        stderr: &Recorder,
        acked: &watch::Sender<Acked>,
        started_at: &mut Option<UnixMs>,
    ) -> Result<Ending, DriveError> {
        loop {
            match wire::receive(&mut input).await? {
                Reply::Started { .. } => {
                    let at = self.daemon.clock.now();
                    *started_at = Some(at);
                    self.progress.send_modify(|progress| progress.started = true);
                    self.note_started(at);
                }
                Reply::Output { stream, offset, data } => {
                    let recorder = if stream == Stream::Stdout { stdout } else { stderr };
                    let total = recorder.append(offset, data).await?;
                    self.show(stream, total, acked);
                }
                Reply::Ended(ended) => return Ok(Ending::Ended(ended)),
                Reply::Refused(refusal) => return Ok(Ending::Refused(refusal)),
                _ => return Err(AgentError::Protocol("not a command's frame".to_owned()).into()),
            }
        }
    }

    fn show(&self, stream: Stream, total: u64, acked: &watch::Sender<Acked>) {
        self.progress.send_modify(|progress| {
            progress.started = true;
            match stream {
                Stream::Stdout => progress.stdout = total,
                Stream::Stderr => progress.stderr = total,
            }
        });
        acked.send_if_modified(|acked| {
            let slot = match stream {
                Stream::Stdout => &mut acked.stdout,
                Stream::Stderr => &mut acked.stderr,
            };
            let due = total.saturating_sub(*slot) >= ACK_EVERY;
            if due {
                *slot = total;
            }
            due
        });
    }

    /// Writes that it runs, if it still does after a while. Of use to readers only.
    fn note_started(&self, at: UnixMs) {
        let (daemon, id, progress) =
            (Arc::clone(self.daemon), self.row.id.clone(), Arc::clone(self.progress));
        tokio::spawn(async move {
            tokio::time::sleep(WORTH_WRITING).await;
            if !progress.borrow().ended
                && let Err(cause) = daemon.store.command_started(&id, at).await
            {
                tracing::warn!(command = id, %cause, "that a command runs could not be written");
            }
        });
    }

    /// Records the end. Until that has succeeded the guest keeps the result.
    async fn record(&self, end: &Finished) {
        let mut wait = BACKOFF_FIRST;
        while let Err(cause) = self.daemon.store.finish_command(&self.row.id, end).await {
            tracing::error!(command = self.row.id, %cause, "the end of a command could not be recorded; trying again");
            tokio::time::sleep(wait).await;
            wait = wait.saturating_mul(2).min(BACKOFF_MAX);
        }
    }
}

/// Says what there is to say: standard input, then how much is recorded, and at last that the result is.
async fn speak(
    mut out: impl AsyncWrite + Unpin,
    stdin: Option<Vec<u8>>,
    mut acked: watch::Receiver<Acked>,
) -> Result<(), FrameError> {
    if let Some(stdin) = stdin {
        for piece in stdin.chunks(MAX_CHUNK) {
            if acked.has_changed().unwrap_or(false) && acknowledge(&mut out, &mut acked).await? {
                return Ok(());
            }
            wire::send(&mut out, &More::Stdin(piece.to_vec())).await?;
        }
        wire::send(&mut out, &More::StdinEnd).await?;
    }
    loop {
        if acked.changed().await.is_err() || acknowledge(&mut out, &mut acked).await? {
            return Ok(());
        }
    }
}

/// True once the last word is said.
async fn acknowledge(
    out: &mut (impl AsyncWrite + Unpin),
    acked: &mut watch::Receiver<Acked>,
) -> Result<bool, FrameError> {
    let Acked { stdout, stderr, finished } = *acked.borrow_and_update();
    let word = if finished { More::Release } else { More::Ack { stdout, stderr } };
    wire::send(out, &word).await?;
    Ok(finished)
}

fn start_command(row: &CommandRow) -> StartCommand {
    let env: BTreeMap<String, String> =
        row.env.as_deref().and_then(|env| serde_json::from_str(env).ok()).unwrap_or_default();
    StartCommand {
        command_id: row.id.clone(),
        argv: serde_json::from_str(&row.argv).unwrap_or_default(),
        cwd: row.cwd.clone(),
        env: env.into_iter().collect(),
        user: row.user_name.clone(),
        timeout_ms: row.timeout_ms.and_then(|ms| u64::try_from(ms).ok()),
    }
}
