//! A daemon from its settings to its end.
//!
//! The order matters: the lock on the data directory before anything in it is touched; the store before the host; what
//! the host holds taken over before the first request is served. An end by signal touches no sandbox.

use crate::agent::{Announcements, listen};
use crate::api;
use crate::auth::{self, AuthError};
use crate::connections;
use crate::daemon::Daemon;
use crate::limits;
use crate::machine::MachineError;
use crate::machine::real::{RealMachines, Settings};
use crate::reconcile::{self, ReconcileError};
use crate::sandboxes;
use crate::store::{Store, StoreError};
use crate::templates::Templates;
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener};

/// How long open requests may take to end after a signal.
const PARTING: std::time::Duration = std::time::Duration::from_secs(5);
/// `VMADDR_PORT_ANY` of linux/vm_sockets.h: the kernel takes a free one.
const VMADDR_PORT_ANY: u32 = u32::MAX;
const PORT: &str = "announcement_port";

#[derive(Debug, Clone)]
pub struct Config {
    pub data_dir: PathBuf,
    pub listen: SocketAddr,
    pub prefix: PathBuf,
    /// Written, whole, once the daemon serves; holds its address.
    pub ready_file: Option<PathBuf>,
    pub console: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("another daemon uses {0}: give this one a data directory of its own with --data-dir")]
    Locked(PathBuf),
    #[error("{what} failed: {cause}")]
    Io { what: String, cause: io::Error },
    #[error(
        "no vsock: {0}. Load the module with `modprobe vhost_vsock`; `bivouac doctor` says what else is missing"
    )]
    Vsock(io::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error(transparent)]
    Auth(#[from] AuthError),
    #[error(transparent)]
    Reconcile(#[from] ReconcileError),
}

impl ServeError {
    /// What to do about it, where the daemon may not do what it has to. None: it is something else, or it is root.
    pub fn advice(&self, uid: u32) -> Option<String> {
        let cause = match self {
            Self::Io { cause, .. } | Self::Vsock(cause) | Self::Machine(MachineError::Io { cause, .. }) => {
                cause
            }
            _ => return None,
        };
        (uid != 0 && cause.kind() == io::ErrorKind::PermissionDenied).then(|| {
            format!(
                "bivouacd needs root, and runs as user {uid}: it makes cgroups and opens /dev/kvm and /dev/vhost-vsock. \
                 Start it with sudo, or as a system service"
            )
        })
    }
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> ServeError {
    let what = what.into();
    move |cause| ServeError::Io { what, cause }
}

/// Serves until SIGTERM or SIGINT.
pub async fn serve(config: Config) -> Result<(), ServeError> {
    let _lock = own(&config.data_dir)?;
    // Before anything is made or a key shown: whoever connects early waits until there is something to answer with.
    let what = format!("listening on {} (choose another address with --listen)", config.listen);
    let tcp = TcpListener::bind(config.listen).await.map_err(io_error(what))?;
    let address = tcp.local_addr().map_err(io_error("listening"))?;
    let instance = instance(&config.data_dir)?;
    let store = Store::open(&config.data_dir.join("store.db")).await?;
    store.seed_cids(u32::from_str_radix(instance.get(..8).unwrap_or("0"), 16).unwrap_or(0)).await?;

    let announcements = Announcements::default();
    let (listener, port) = announcement_listener(&store).await?;
    let settings = Settings {
        data_dir: config.data_dir.clone(),
        prefix: config.prefix.clone(),
        instance,
        console: config.console,
    };
    let machines = Arc::new(RealMachines::new(settings)?);
    let templates = Templates::new(config.prefix.join("templates"));
    let daemon = Arc::new(Daemon::new(
        store,
        machines,
        announcements.clone(),
        templates,
        config.data_dir.clone(),
        port,
    ));

    let key_file = config.data_dir.join("admin.key");
    if let Some(key) = auth::first_key(&daemon.store, &key_file, daemon.clock.now()).await? {
        eprintln!("admin key, shown this once and kept in {}: {key}", key_file.display());
    }
    daemon.reserve.keep();
    tokio::spawn(listen(listener, announcements));
    reconcile::take_over(&daemon).await?;
    tokio::spawn(sandboxes::sweep(Arc::clone(&daemon)));

    let stop = stop_signal().map_err(io_error("waiting for signals"))?;
    ready(&config, address)?;
    let (stopping, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = connections::serve(tcp, api::router(Arc::clone(&daemon)), limits::HEAD, async move {
        stop.await;
        tracing::info!("stopping; sandboxes go on");
        let _ = stopping.send(());
    });
    tokio::select! {
        () = server => {}
        () = async { let _ = stopped.await; tokio::time::sleep(PARTING).await } => {}
    }
    daemon.store.close().await;
    Ok(())
}

/// Makes the data directory this daemon's own, for as long as the result lives.
fn own(data_dir: &Path) -> Result<File, ServeError> {
    let what = || format!("making the data directory {}", data_dir.display());
    fs::DirBuilder::new().recursive(true).mode(0o700).create(data_dir).map_err(io_error(what()))?;
    let path = data_dir.join("lock");
    let lock = fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(io_error(format!("opening {}", path.display())))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ServeError::Locked(data_dir.to_owned())),
        Err(e) => Err(io_error(format!("locking {}", path.display()))(e.into())),
    }
}

/// A name for what this daemon owns on the host outside its data directory. It follows from where that directory is, so
/// that a directory that was emptied by hand still leads to what it left.
fn instance(data_dir: &Path) -> Result<String, ServeError> {
    let what = || format!("looking at {}", data_dir.display());
    let path = fs::canonicalize(data_dir).map_err(io_error(what()))?;
    let device = fs::metadata(&path).map_err(io_error(what()))?.dev();
    let digest = Sha256::digest(format!("{device} {}", path.display()));
    Ok(auth::hex(&digest).chars().take(16).collect())
}

/// The port that guests announce themselves to. Kept across restarts: a guest that boots while the daemon is away has it
/// on its command line.
async fn announcement_listener(store: &Store) -> Result<(VsockListener, u32), ServeError> {
    let known = store.meta(PORT).await?.and_then(|port| port.parse::<u32>().ok());
    if let Some(port) = known {
        match VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port)) {
            Ok(listener) => return Ok((listener, port)),
            Err(cause) => tracing::warn!(port, %cause, "the announcement port is taken; using another"),
        }
    }
    let listener =
        VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, VMADDR_PORT_ANY)).map_err(ServeError::Vsock)?;
    let port = listener.local_addr().map_err(ServeError::Vsock)?.port();
    store.set_meta(PORT, &port.to_string()).await?;
    Ok((listener, port))
}

fn stop_signal() -> io::Result<impl Future<Output = ()> + Send> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    })
}

fn ready(config: &Config, address: SocketAddr) -> Result<(), ServeError> {
    if let Some(path) = &config.ready_file {
        let beside = path.with_extension("new");
        fs::write(&beside, format!("http://{address}\n"))
            .and_then(|()| fs::rename(&beside, path))
            .map_err(io_error(format!("writing {}", path.display())))?;
    }
    let mut out = io::stdout().lock();
    // Whoever started this may have gone: that is no reason to go too.
    let _ = writeln!(out, "bivouacd ready on http://{address}");
    let _ = out.flush();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_make_a_cgroup_is_told_to_be_root() {
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        let cgroup = ServeError::Machine(MachineError::io("making /sys/fs/cgroup/bivouac")(denied()));
        let advice = cgroup.advice(1000).unwrap();
        assert!(
            advice.contains("needs root") && advice.contains("1000") && advice.contains("sudo"),
            "{advice}"
        );
        assert!(io_error("making the data directory")(denied()).advice(1000).is_some());
        assert!(cgroup.advice(0).is_none(), "root is denied for another reason");
        let taken = io_error("listening")(io::ErrorKind::AddrInUse.into());
        assert!(taken.advice(1000).is_none());
    }
}
