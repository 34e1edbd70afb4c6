//! Frames over vsock, and the one window they travel in.

use bivouac_protocol::frame::{self, FrameError, PREFIX};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, unix::AsyncFd};

/// Receive window of every connection, in bytes. A guest kernel counts packets as well as bytes against it, so it is
/// large enough for many small frames that nobody has read yet.
const WINDOW: u64 = 1 << 20;

const SO_VM_SOCKETS_BUFFER_SIZE: libc::c_int = 0;
const SO_VM_SOCKETS_BUFFER_MAX_SIZE: libc::c_int = 2;

/// Sets the window of a socket, or of what a listening one will accept.
pub fn widen(socket: &impl AsRawFd) -> io::Result<()> {
    for option in [SO_VM_SOCKETS_BUFFER_MAX_SIZE, SO_VM_SOCKETS_BUFFER_SIZE] {
        // SAFETY: the option's value is a u64, and pointer and length are those of one.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::AF_VSOCK,
                option,
                ptr::from_ref(&WINDOW).cast(),
                size_of::<u64>() as libc::socklen_t,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Waits until the connection is cut by a reset of the transport: the kernel puts an error on every connection of a
/// machine that was taken up as another one. It does not wake readers for it, so somebody has to wait for the error.
pub fn reset(socket: BorrowedFd<'_>) -> io::Result<impl Future<Output = ()> + use<>> {
    let copy = socket.try_clone_to_owned()?;
    // SAFETY: the copy is owned by the AsyncFd, so it stays open and the same for as long as that lives.
    let watched = unsafe { AsyncFd::register_with_interest(copy, Interest::ERROR) }?;
    Ok(async move {
        // Fails only with the event loop, which lives as long as the agent.
        let _ = watched.ready(Interest::ERROR).await;
    })
}

pub async fn read<T: DeserializeOwned>(from: &mut (impl AsyncRead + Unpin)) -> Result<T, FrameError> {
    let mut prefix = [0; PREFIX];
    match from.read(&mut prefix[..1]).await? {
        0 => return Err(FrameError::Closed),
        _ => from.read_exact(&mut prefix[1..]).await?,
    };
    let mut body = vec![0; frame::body_len(prefix)?];
    from.read_exact(&mut body).await?;
    frame::decode(&body)
}

pub async fn write<T: Serialize>(to: &mut (impl AsyncWrite + Unpin), message: &T) -> Result<(), FrameError> {
    to.write_all(&frame::encode(message)?).await?;
    Ok(())
}
