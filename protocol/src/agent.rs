//! Daemon and agent.
//!
//! Two kinds of connection, both vsock streams of [`crate::frame`]s:
//!
//! * **Announcement**, agent to daemon: the agent connects to the host port named on its kernel command line, sends
//!   [`Hello`], gets one [`Configure`] and answers [`Reply::Configured`]. Nothing is admitted before that. Both sides
//!   then keep the connection; when it breaks, the agent announces itself anew. A machine that was taken up from a
//!   snapshot has all its connections broken, and so says by itself that it is there.
//! * **Operation**, daemon to agent port [`AGENT_PORT`]: the first frame is [`Open`], and what follows depends on the
//!   request. Closing an operation's connection cancels nothing but that view of it.
//!
//! | request | the daemon then sends | the agent then sends |
//! | --- | --- | --- |
//! | `Ping` | | `Pong` |
//! | `Configure` | | `Configured` |
//! | `Start` | `Stdin`\*, `StdinEnd`, `Ack`\*, `Release`? | `Started`?, `Output`\*, `Ended`; or `Refused` |
//! | `Attach` | `Ack`\*, `Release`? | `Output`\*, `Ended`; or `Refused` |
//! | `Signal`, `Cancel` | | `Done`; or `Refused` |
//! | `ReadFile` | | `File`, `Chunk`\*, `End`; or `Refused` at any point |
//! | `WriteFile` | `Chunk`\*, `End` | `Done` once renamed into place; or `Refused` at any point |
//! | `Shutdown` | | `Done`, then the machine powers off |

use serde::{Deserialize, Serialize};

/// Version of everything in this module. Raised with every change that the other side would misread.
pub const VERSION: u16 = 2;

/// vsock port the agent listens on. Below 1024, so that in the guest only root can bind it.
pub const AGENT_PORT: u32 = 1000;

/// Kernel command line parameter with the host port to announce to: `bivouac.port=N`.
pub const PORT_PARAMETER: &str = "bivouac.port";

/// Bytes of one stream the agent keeps until they are acknowledged. A command that is further ahead than this waits
/// in `write(2)`, so that no byte is lost and the guest's memory stays bounded.
pub const WINDOW: u64 = 256 << 10;

/// Most bytes of standard input, in all.
pub const STDIN_MAX: usize = 1 << 20;

/// How long a command's group gets between TERM and KILL, in milliseconds.
pub const TERM_GRACE_MS: u64 = 2_000;

/// How long output is still collected after a command's leader has ended while a child holds its pipe, in ms.
pub const DRAIN_MS: u64 = 200;

/// The agent's first words on an announcement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub version: u16,
    /// The kernel's random boot id; tells one boot of a sandbox from the next.
    pub boot_id: String,
    /// Microseconds from kernel entry to this message, by the guest's monotonic clock.
    pub uptime_us: u64,
}

/// What makes this guest this sandbox. Sent before any command is admitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configure {
    pub hostname: String,
    /// Fresh host randomness, credited to the guest's pool, which is reseeded from it at once.
    #[serde(with = "serde_bytes")]
    pub entropy: Vec<u8>,
    /// Wall-clock time, in nanoseconds since 1970-01-01 UTC.
    pub unix_time_ns: u64,
    /// The environment every command starts from, whole: nothing of the agent's own is added.
    pub env: Vec<(String, String)>,
    /// User that commands run as when a request names none.
    pub user: String,
    /// Working directory when a request names none. Made, and given to `user`, if it is missing.
    pub workdir: String,
}

/// First frame of every operation connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    pub version: u16,
    pub request: Request,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    Ping,
    Configure(Configure),
    Start(StartCommand),
    /// Take up a command that was started before, reading each stream on from an absolute offset.
    Attach {
        command_id: String,
        stdout_offset: u64,
        stderr_offset: u64,
    },
    /// Send a signal to the command's process group.
    Signal {
        command_id: String,
        signal: i32,
    },
    /// TERM to the whole command, KILL after the grace; it ends as [`Outcome::Canceled`].
    Cancel {
        command_id: String,
    },
    ReadFile {
        path: String,
        user: Option<String>,
    },
    /// `mode` applies to a new file; an existing one keeps its own unless a mode is given.
    WriteFile {
        path: String,
        user: Option<String>,
        mode: Option<u32>,
    },
    Shutdown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartCommand {
    /// Unique for the life of the sandbox. An id seen before in this boot is [`Refusal::Duplicate`].
    pub command_id: String,
    pub argv: Vec<String>,
    pub cwd: Option<String>,
    /// Added to, and overriding, the environment from [`Configure`].
    pub env: Vec<(String, String)>,
    pub user: Option<String>,
    /// From the start of the process to TERM. None: no limit.
    pub timeout_ms: Option<u64>,
}

/// What the daemon sends after [`Open`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum More {
    /// All of standard input, at most [`STDIN_MAX`] bytes, comes before the command is started: a connection that breaks
    /// before `StdinEnd` has started nothing.
    Stdin(#[serde(with = "serde_bytes")] Vec<u8>),
    StdinEnd,
    /// Every byte below these offsets is recorded on the host and may be forgotten in the guest.
    Ack {
        stdout: u64,
        stderr: u64,
    },
    /// The result is recorded: forget the command's output and outcome. Its id stays known.
    Release,
    Chunk(#[serde(with = "serde_bytes")] Vec<u8>),
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// What the agent sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    Pong {
        version: u16,
        boot_id: String,
        configured: bool,
    },
    Configured,
    Done,
    Refused(Refusal),
    Started {
        pid: u32,
    },
    Output {
        stream: Stream,
        offset: u64,
        #[serde(with = "serde_bytes")]
        data: Vec<u8>,
    },
    /// The last frame of a command: every byte of both streams has been sent before it.
    Ended(Ended),
    File(FileInfo),
    Chunk(#[serde(with = "serde_bytes")] Vec<u8>),
    End,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    pub size: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Modification time, in seconds since 1970-01-01 UTC.
    pub modified: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    pub outcome: Outcome,
    /// Bytes the command wrote to each stream, whatever was kept of them.
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    /// From start to the leader's end.
    pub wall_us: u64,
    /// Processor time of the leader and the children it waited for.
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_kib: u64,
    /// What the guest's kernel refused it, or ended it for, up to its leader's end.
    pub limits_hit: Vec<Limit>,
}

/// What a command can run out of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    /// A process of it was ended for want of memory.
    Memory,
    /// It was refused a process or thread: it had as many as one command may have, or all commands together had.
    Pids,
}

impl Ended {
    /// Of a command that wrote nothing and took no time.
    pub fn not_started(failure: StartFailure) -> Self {
        Self {
            outcome: Outcome::StartFailed(failure),
            stdout_bytes: 0,
            stderr_bytes: 0,
            wall_us: 0,
            user_us: 0,
            system_us: 0,
            max_rss_kib: 0,
            limits_hit: Vec::new(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Exited {
        code: u8,
    },
    /// `oom_killed`: the guest's kernel ended a process of this command for want of memory.
    Signaled {
        signal: i32,
        oom_killed: bool,
    },
    /// The timeout passed. `killed`: the grace passed too, and KILL was needed.
    TimedOut {
        killed: bool,
    },
    Canceled {
        killed: bool,
    },
    StartFailed(StartFailure),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartFailure {
    pub kind: StartFailureKind,
    /// In plain words, naming the path or user.
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StartFailureKind {
    /// No such program, on `PATH` or at the path given.
    NotFound,
    /// It is there and may not be executed, or is not a program.
    NotExecutable,
    /// The script's interpreter, or the program's loader, is missing.
    BadInterpreter,
    NoSuchDirectory,
    /// The working directory is there, and the user may not enter it.
    DirectoryForbidden,
    NoSuchUser,
    OutOfMemory,
    TooManyProcesses,
    /// argv and environment together are above what the guest kernel takes.
    ArgumentsTooLong,
    Other,
}

/// Why a request was not carried out. Nothing has changed in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    Version {
        agent: u16,
    },
    NotConfigured,
    /// This command id was started in this boot; attach to it.
    Duplicate,
    /// This command id was never started in this boot.
    UnknownCommand,
    /// The command has ended and its result was released.
    Released,
    /// A limit of the agent's own: too many commands or connections at once.
    Busy {
        detail: String,
    },
    Invalid {
        detail: String,
    },
    /// A file operation's failure: the error number of the call that failed, and the path it was for.
    File {
        errno: i32,
        detail: String,
    },
    /// What is at the path is a device, a pipe or a socket, and neither read nor replaced.
    NotRegular {
        detail: String,
    },
}
