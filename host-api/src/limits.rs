//! Every cap on what a caller or a guest may send, in one place.

use std::time::Duration;

/// Largest JSON request body, in bytes.
pub const JSON_BODY: usize = 2 << 20;
/// argv and environment of one command together, in bytes.
pub const ARGV_AND_ENV: usize = 512 << 10;
/// Standard input of one command, in bytes.
pub const STDIN: usize = bivouac_protocol::agent::STDIN_MAX;
pub const REQUEST_ID: usize = 128;
pub const NAME: usize = 128;
pub const PATH: usize = 4096;
pub const USER: usize = 256;
pub const ARGV_ITEMS: usize = 16 << 10;
pub const ENV_ITEMS: usize = 4096;
pub const METADATA_ITEMS: usize = 64;
/// Metadata keys and values together, in bytes.
pub const METADATA: usize = 16 << 10;

/// Kept output of one stream, in bytes.
pub const OUTPUT_DEFAULT: u64 = 1 << 20;
pub const OUTPUT_MIN: u64 = 1 << 10;
pub const OUTPUT_MAX: u64 = 64 << 20;

pub const VCPUS_MAX: u32 = 32;
pub const MEMORY_MIB_MIN: u32 = 64;
pub const MEMORY_MIB_MAX: u32 = 65_536;
/// Ten years. A life without an end is asked for by leaving `ttl_ms` out.
pub const TTL_MS_MAX: i64 = 10 * 365 * 24 * 3_600 * 1_000;
/// Thirty days.
pub const TIMEOUT_MS_MAX: i64 = 30 * 24 * 3_600 * 1_000;
pub const PAGE_DEFAULT: i64 = 100;
pub const PAGE_MAX: i64 = 1_000;

/// From the start of the monitor to the agent's first word. Generous: a host under emulation is 50 times slower.
pub const BOOT: Duration = Duration::from_secs(120);
/// From the agent's first word to its being configured.
pub const CONFIGURE: Duration = Duration::from_secs(30);
/// Connecting to the agent of a sandbox that runs.
pub const CONNECT: Duration = Duration::from_secs(10);
/// Any one answer of the agent that does not wait for a program.
pub const ANSWER: Duration = Duration::from_secs(30);
/// A file transfer or a request's body that moves no byte for this long has failed.
pub const STALL: Duration = Duration::from_secs(60);
/// How long a connection may take to send a request's head, and may lie idle before it.
pub const HEAD: Duration = Duration::from_secs(60);
/// How much longer than its timeout and the grace a command's end may take before a waiter is answered without it.
pub const WATCHDOG_MARGIN: Duration = Duration::from_secs(10);
/// Longest wait for the release in `DELETE ?wait=1`.
pub const RELEASE_WAIT: Duration = Duration::from_secs(60);
