//! The journal: what was accepted, what became of it, and who did it.
//!
//! Every operation is a row here before it is an action, and a row is durable when the call that wrote it returns
//! (WAL, `synchronous = FULL`). Rows are typed here and are not the API's types. What must never happen here: a state
//! written without the guard `delete_accepted_at IS NULL` in the statement itself, or an effect on the world.

mod commands;
mod events;
mod keys;
mod meta;
mod sandboxes;
#[cfg(test)]
mod tests;

pub use commands::{Accepted, CommandRow, CommandStatus, Finished, LimitHit, NewCommand};
pub use events::{EventRow, NewEvent, link};
pub use keys::{KeyRow, NewKey};
pub use sandboxes::{Applied, Details, NewSandbox, Reserved, SandboxRow};

use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Connection, Sqlite, Transaction};
use std::path::Path;
use std::time::Duration;

pub(crate) type Tx = Transaction<'static, Sqlite>;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("store failed: {0}")]
    Database(#[from] sqlx::Error),
    #[error("store could not be brought up to date: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    #[error("store holds a value this version does not know: {0}")]
    Unknown(String),
}

impl StoreError {
    /// Whether the disk has no room for what was to be written.
    pub fn disk_full(&self) -> bool {
        /// `SQLITE_FULL`, and `SQLITE_IOERR_SHMSIZE`: the index of the write-ahead log could not grow.
        const NO_ROOM: [&str; 2] = ["13", "4874"];
        match self {
            Self::Database(sqlx::Error::Database(cause)) => {
                cause.code().is_some_and(|code| NO_ROOM.contains(&code.as_ref()))
            }
            _ => false,
        }
    }
}

pub type Result<T> = std::result::Result<T, StoreError>;

#[derive(Debug, Clone)]
pub struct Store {
    /// One connection: SQLite has one writer, and waiting here is fairer than its busy handler.
    writer: SqlitePool,
    reader: SqlitePool,
}

impl Store {
    /// Opens the store, makes it if it is not there, and brings its tables up to date.
    pub async fn open(path: &Path) -> Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(10));
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .min_connections(1)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            // SQLite may end a transaction by itself where a write fails (a full disk). The connection then counts one
            // that is no longer there, and would begin no other: it makes way for a new one.
            .before_acquire(|connection, _| Box::pin(async move { Ok(!connection.is_in_transaction()) }))
            .connect_with(options.clone())
            .await?;
        sqlx::migrate!("./migrations").run(&writer).await?;
        let reader = SqlitePoolOptions::new()
            .max_connections(4)
            .min_connections(1)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .connect_with(options)
            .await?;
        Ok(Self { writer, reader })
    }

    pub async fn close(&self) {
        self.reader.close().await;
        self.writer.close().await;
    }

    async fn write(&self) -> Result<Tx> {
        Ok(self.writer.begin_with("BEGIN IMMEDIATE").await?)
    }
}
