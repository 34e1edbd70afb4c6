//! Recorded output: written by the one task that drives the command, read by anybody at any time.

use crate::daemon::Daemon;
use crate::machine::spool_path;
use crate::spool::{Extent, Spool};
use crate::store::CommandRow;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use utoipa::ToSchema;

use crate::sync::lock;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StreamName {
    Stdout,
    Stderr,
}

impl StreamName {
    pub fn as_str(self) -> &'static str {
        match self {
            StreamName::Stdout => "stdout",
            StreamName::Stderr => "stderr",
        }
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(io::Error::other(e)))
}

fn path(daemon: &Daemon, row: &CommandRow, stream: StreamName) -> PathBuf {
    spool_path(&daemon.data_dir, &row.sandbox_id, &row.id, stream.as_str())
}

/// The writing side of one stream. The file comes to be with the first byte.
#[derive(Debug, Clone)]
pub(super) struct Recorder {
    path: PathBuf,
    limit: u64,
    spool: Arc<Mutex<Option<Spool>>>,
}

impl Recorder {
    pub async fn open(daemon: &Daemon, row: &CommandRow, stream: StreamName) -> io::Result<Self> {
        let path = path(daemon, row, stream);
        let limit = u64::try_from(row.output_limit_bytes).unwrap_or(0);
        let file = path.clone();
        let spool = Arc::new(Mutex::new(blocking(move || Spool::open(&file)).await?));
        Ok(Self { path, limit, spool })
    }

    pub fn total(&self) -> u64 {
        lock(&self.spool).as_ref().map_or(0, Spool::total)
    }

    /// Records bytes at an absolute offset; the new total.
    pub async fn append(&self, offset: u64, data: Vec<u8>) -> io::Result<u64> {
        let this = self.clone();
        blocking(move || {
            let mut slot = lock(&this.spool);
            if slot.is_none() {
                *slot = Some(Spool::open_or_create(&this.path, this.limit)?);
            }
            let Some(spool) = slot.as_mut() else { return Ok(0) };
            spool.append(offset, &data)?;
            Ok(spool.total())
        })
        .await
    }
}

/// What was kept of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    pub extent: Extent,
    /// `[0, extent.head_end)`, or everything if nothing was dropped.
    pub head: Vec<u8>,
    /// `[extent.tail_start, extent.total)`, or nothing.
    pub tail: Vec<u8>,
}

/// The reading side of one stream.
#[derive(Debug)]
pub struct OutputReader {
    path: PathBuf,
}

impl OutputReader {
    pub fn new(daemon: &Daemon, row: &CommandRow, stream: StreamName) -> Self {
        Self { path: path(daemon, row, stream) }
    }

    pub async fn extent(&self) -> io::Result<Extent> {
        let path = self.path.clone();
        blocking(move || Ok(Spool::open(&path)?.map_or(Extent::EMPTY, |spool| spool.extent()))).await
    }

    /// Kept bytes at the first kept offset at or after `offset`, with that offset and the extent at the time.
    pub async fn read(&self, offset: u64, max: usize) -> io::Result<(Extent, u64, Vec<u8>)> {
        let path = self.path.clone();
        blocking(move || {
            let Some(mut spool) = Spool::open(&path)? else { return Ok((Extent::EMPTY, offset, Vec::new())) };
            let mut at = offset;
            loop {
                let data = spool.read(at, max)?;
                let extent = spool.extent();
                let next = extent.next_kept(at);
                // Nothing at an offset that lies in the gap by now: go on where bytes are kept again.
                if data.is_empty() && next != at {
                    at = next;
                    continue;
                }
                return Ok((extent, at, data));
            }
        })
        .await
    }

    /// All that was kept: the limit bounds it.
    pub async fn kept(&self) -> io::Result<Kept> {
        let path = self.path.clone();
        blocking(move || {
            let Some(mut spool) = Spool::open(&path)? else {
                return Ok(Kept { extent: Extent::EMPTY, head: Vec::new(), tail: Vec::new() });
            };
            let (extent, mut head, mut tail) = spool.snapshot()?;
            if extent.dropped() == 0 {
                head.append(&mut tail);
            }
            Ok(Kept { extent, head, tail })
        })
        .await
    }
}
