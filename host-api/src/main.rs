//! `bivouacd`: one per host.

use bivouacd::serve::{Config, serve};
use clap::Parser;
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// The Bivouac daemon: throw-away microVMs over HTTP.
///
/// Needs root, /dev/kvm, /dev/vhost-vsock and cgroup v2; `bivouac doctor` says what is missing. Stopping it leaves
/// sandboxes running: the next start takes them up again.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
Examples:
  bivouacd                                             serve on 127.0.0.1:8080
  bivouacd --listen 127.0.0.1:0 --data-dir /tmp/biv    a free port; it is in the line printed when ready

Log level: BIVOUAC_LOG, such as `debug` or `bivouacd::machine=trace`; `--log-format json` for machines."
)]
struct Args {
    /// State that survives restarts: the store, the admin key, sandboxes' folders. One daemon per directory.
    #[arg(long, env = "BIVOUAC_DATA_DIR", default_value = "/var/lib/bivouac")]
    data_dir: PathBuf,
    /// Address to serve HTTP on. Port 0 takes a free one.
    #[arg(long, env = "BIVOUAC_LISTEN", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Folder with bin/bivouac-vmm, kernel/vmlinux, templates/ and scratch/. By default the one this program's own bin/
    /// is in.
    #[arg(long, env = "BIVOUAC_PREFIX")]
    prefix: Option<PathBuf>,
    /// Write the address to this file once serving.
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
    /// Give guests a serial console that goes to their log. For debugging: it slows every boot.
    #[arg(long, env = "BIVOUAC_CONSOLE")]
    console: bool,
    /// How to write the log, which goes to standard error.
    #[arg(long, env = "BIVOUAC_LOG_FORMAT", value_enum, default_value = "text")]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

/// Standard error, for as long as it takes what it is given. A log on a full disk, or whose reader has gone, is no reason
/// to stop: without this, a line that cannot be written ends whatever wrote it.
struct Log;

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        Ok(io::stderr().write(line).unwrap_or(line.len()))
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = io::stderr().flush();
        Ok(())
    }
}

/// The folder above the one this program is in, if it holds a guest kernel too.
fn own_prefix() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let prefix = program.parent()?.parent()?;
    prefix.join("kernel/vmlinux").exists().then(|| prefix.to_path_buf())
}

fn main() -> ExitCode {
    let args = Args::parse();
    // Whatever this program makes is its own: the store holds what callers sent, secrets in environments included.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let filter = EnvFilter::try_from_env("BIVOUAC_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Log);
    match args.log_format {
        LogFormat::Text => log.with_target(false).with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => log.json().init(),
    }
    let config = Config {
        data_dir: args.data_dir,
        listen: args.listen,
        prefix: args.prefix.or_else(own_prefix).unwrap_or_else(|| PathBuf::from("/usr/lib/bivouac")),
        ready_file: args.ready_file,
        console: args.console,
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(cause) => {
            eprintln!("bivouacd: no runtime: {cause}");
            return ExitCode::FAILURE;
        }
    };
    let served = runtime.block_on(serve(config));
    // Blocking work may still be on its way (a disk being copied): the next start finds what it left.
    runtime.shutdown_background();
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("bivouacd: {cause}");
            if let Some(advice) = cause.advice(rustix::process::geteuid().as_raw()) {
                eprintln!("{advice}");
            }
            ExitCode::FAILURE
        }
    }
}
