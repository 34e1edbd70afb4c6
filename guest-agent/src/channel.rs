//! Frames over vsock, and the one window they travel in.

use bivouac_protocol::frame::{self, FrameError, PREFIX};
use serde::{Serialize, de::DeserializeOwned};
use std::{io, os::fd::AsRawFd, ptr};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

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
