//! Files in and out, with the credentials of a user of the sandbox: whatever links the path holds, nothing is read or
//! written that this user could not.
//!
//! Each transfer has a thread of its own, because file system credentials are a thread's: it takes them on, copies in
//! constant memory, and ends.

use crate::users::{self, User};
use bivouac_protocol::{
    agent::{FileInfo, More, Refusal, Reply},
    frame::{self, FrameError, MAX_CHUNK},
};
use rustix::fs::{FileType, Mode, OFlags};
use std::{
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};
use tokio::sync::oneshot;
use tokio_vsock::VsockStream;

/// Transfers at a time.
const TRANSFERS_MAX: usize = 64;
static TRANSFERS: AtomicUsize = AtomicUsize::new(0);
/// Names of the temporary files beside their targets.
static SERIAL: AtomicUsize = AtomicUsize::new(0);

/// Sends a file.
pub async fn send(stream: VsockStream, path: PathBuf, user: String) -> Result<(), FrameError> {
    transfer(stream, user, move |stream| match open_for_reading(&path) {
        Ok((file, info)) => send_file(stream, &file, info, &path),
        Err(refusal) => frame::write(stream, &Reply::Refused(refusal)),
    })
    .await
}

/// Receives a file: written beside its target and renamed over it, so that a reader sees the old one or the new one.
pub async fn receive(
    stream: VsockStream,
    path: PathBuf,
    user: String,
    mode: Option<u32>,
) -> Result<(), FrameError> {
    transfer(stream, user, move |stream| {
        let reply = match receive_file(stream, &path, mode) {
            Ok(()) => Reply::Done,
            Err(Broken::Refused(refusal)) => Reply::Refused(refusal),
            Err(Broken::Channel(e)) => return Err(e),
        };
        frame::write(stream, &reply)
    })
    .await
}

/// Runs `work` as `user`, on a thread of its own, with the connection as a blocking stream.
async fn transfer(
    mut stream: VsockStream,
    user: String,
    work: impl FnOnce(&mut File) -> Result<(), FrameError> + Send + 'static,
) -> Result<(), FrameError> {
    let refusal = match users::find(&user) {
        Err(e) => Some(Refusal::File { errno: libc::EINVAL, detail: e.to_string() }),
        Ok(_) if TRANSFERS.load(Ordering::Relaxed) >= TRANSFERS_MAX => {
            Some(Refusal::Busy { detail: format!("{TRANSFERS_MAX} transfers are under way") })
        }
        Ok(user) => {
            let socket = stream.as_fd().try_clone_to_owned()?;
            drop(stream);
            return on_thread(socket, user, work).await;
        }
    };
    match refusal {
        Some(refusal) => crate::channel::write(&mut stream, &Reply::Refused(refusal)).await,
        None => Ok(()),
    }
}

async fn on_thread(
    socket: OwnedFd,
    user: User,
    work: impl FnOnce(&mut File) -> Result<(), FrameError> + Send + 'static,
) -> Result<(), FrameError> {
    rustix::io::ioctl_fionbio(&socket, false).map_err(io::Error::from)?;
    let (report, outcome) = oneshot::channel();
    TRANSFERS.fetch_add(1, Ordering::Relaxed);
    let thread = thread::Builder::new().name("transfer".into()).stack_size(256 << 10).spawn(move || {
        // SAFETY: the descriptor is owned and given away here. A socket reads and writes like any file.
        let mut socket = unsafe { File::from_raw_fd(socket.into_raw_fd()) };
        let result = become_user(&user).map_err(FrameError::from).and_then(|()| work(&mut socket));
        TRANSFERS.fetch_sub(1, Ordering::Relaxed);
        let _ = report.send(result);
    });
    if let Err(e) = thread {
        TRANSFERS.fetch_sub(1, Ordering::Relaxed);
        return Err(e.into());
    }
    outcome.await.unwrap_or_else(|_| Err(io::Error::other("a transfer's thread ended early").into()))
}

/// Takes on a user's file system credentials, for this thread and for good. Raw calls: the C library would change every
/// thread. Leaving uid 0 drops the capabilities that override permissions.
fn become_user(user: &User) -> io::Result<()> {
    let (uid, gid) = (libc::c_long::from(user.uid), libc::c_long::from(user.gid));
    // SAFETY: pointer and length are those of one slice; the others take numbers.
    unsafe {
        if libc::syscall(libc::SYS_setgroups, user.groups.len(), user.groups.as_ptr()) < 0 {
            return Err(io::Error::last_os_error());
        }
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsuid, uid);
        // These two report nothing, so ask what is in force.
        if libc::syscall(libc::SYS_setfsgid, -1) != gid || libc::syscall(libc::SYS_setfsuid, -1) != uid {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
    }
    Ok(())
}

fn refusal(path: &Path) -> impl Fn(io::Error) -> Refusal {
    let path = path.display().to_string();
    move |e| Refusal::File { errno: e.raw_os_error().unwrap_or(libc::EIO), detail: format!("{path}: {e}") }
}

/// What a path leads to, if that is neither a file nor a folder.
fn other_kind(path: &Path, found: &std::fs::Metadata) -> Option<Refusal> {
    let kind = match FileType::from_raw_mode(found.mode()) {
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => return None,
    };
    Some(Refusal::NotRegular { detail: format!("{}: it is {kind}, not a regular file", path.display()) })
}

fn open_for_reading(path: &Path) -> Result<(File, FileInfo), Refusal> {
    let refused = refusal(path);
    // Before it is opened: to open a device can do something, or fail for reasons that say nothing of what it is.
    if let Some(other) = std::fs::metadata(path).ok().and_then(|found| other_kind(path, &found)) {
        return Err(other);
    }
    // Not blocking: a pipe without a writer must not hold the thread.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| refused(e.into()))?;
    let file = File::from(file);
    let found = file.metadata().map_err(&refused)?;
    match FileType::from_raw_mode(found.mode()) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(refused(io::Error::from_raw_os_error(libc::EISDIR))),
        _ => {
            // Put there since it was looked at.
            let other = other_kind(path, &found);
            return Err(other.unwrap_or_else(|| refused(io::Error::from_raw_os_error(libc::EINVAL))));
        }
    }
    let info = FileInfo {
        size: found.len(),
        mode: found.mode() & 0o7777,
        uid: found.uid(),
        gid: found.gid(),
        modified: found.mtime(),
    };
    Ok((file, info))
}

/// Sends exactly as many bytes as were announced; a file that shrinks meanwhile is refused at that point.
fn send_file(stream: &mut File, file: &File, info: FileInfo, path: &Path) -> Result<(), FrameError> {
    let mut left = info.size;
    frame::write(stream, &Reply::File(info))?;
    let mut content = file.take(left);
    while left > 0 {
        let mut chunk = vec![0; MAX_CHUNK];
        let got = match content.read(&mut chunk) {
            Ok(0) => {
                let why = io::Error::other("the file became shorter while it was read");
                return frame::write(stream, &Reply::Refused(refusal(path)(why)));
            }
            Ok(got) => got,
            Err(e) => return frame::write(stream, &Reply::Refused(refusal(path)(e))),
        };
        chunk.truncate(got);
        left = left.saturating_sub(got as u64);
        frame::write(stream, &Reply::Chunk(chunk))?;
    }
    frame::write(stream, &Reply::End)
}

enum Broken {
    Refused(Refusal),
    Channel(FrameError),
}

/// A temporary file that is gone unless it was renamed.
struct Beside {
    path: PathBuf,
    renamed: bool,
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn receive_file(stream: &mut File, path: &Path, mode: Option<u32>) -> Result<(), Broken> {
    let mut target = prepare_target(path, mode);
    // The daemon is heard to the end even after a failure, so that it can read the reply.
    loop {
        match frame::read(stream).map_err(Broken::Channel)? {
            More::Chunk(chunk) => {
                if let Ok((file, _)) = &mut target
                    && let Err(e) = file.write_all(&chunk)
                {
                    target = Err(refusal(path)(e));
                }
            }
            More::End => break,
            _ => return Err(Broken::Refused(Refusal::Invalid { detail: "expected file content".into() })),
        }
    }
    let (file, mut beside) = target.map_err(Broken::Refused)?;
    let refused = |e| Broken::Refused(refusal(path)(e));
    // What is reported as written is on the disk, where a full disk shows too.
    file.sync_data().map_err(refused)?;
    std::fs::rename(&beside.path, path).map_err(refused)?;
    beside.renamed = true;
    Ok(())
}

fn prepare_target(path: &Path, mode: Option<u32>) -> Result<(File, Beside), Refusal> {
    let refused = refusal(path);
    let (Some(parent), Some(_)) = (path.parent(), path.file_name()) else {
        return Err(refused(io::Error::from_raw_os_error(libc::EISDIR)));
    };
    let existing = std::fs::symlink_metadata(path);
    if existing.as_ref().is_ok_and(std::fs::Metadata::is_dir) {
        return Err(refused(io::Error::from_raw_os_error(libc::EISDIR)));
    }
    // A device or a pipe that others use is not what an upload is to put an end to.
    if let Some(other) = existing.as_ref().ok().and_then(|found| other_kind(path, found)) {
        return Err(other);
    }
    let mode =
        mode.or_else(|| existing.ok().filter(|e| e.is_file()).map(|e| e.mode())).unwrap_or(0o644) & 0o7777;
    // A target's name may be as long as the file system allows, so the temporary one does not contain it.
    let temporary = format!(".bivouac-upload-{}", SERIAL.fetch_add(1, Ordering::Relaxed));
    let beside = Beside { path: parent.join(temporary), renamed: false };
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(&beside.path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| refused(e.into()))?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(|e| refused(e.into()))?;
    Ok((File::from(file), beside))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_regular_file_is_read_or_replaced() {
        for path in ["/dev/zero", "/dev/tty"] {
            let path = Path::new(path);
            for refused in [open_for_reading(path).err(), prepare_target(path, None).err()] {
                let Some(Refusal::NotRegular { detail }) = refused else {
                    panic!("{}: {refused:?}", path.display())
                };
                assert!(detail.contains("a device, not a regular file"), "{detail}");
            }
        }
    }
}
