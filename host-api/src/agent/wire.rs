//! Frames over an asynchronous connection.

use bivouac_protocol::frame::{self, FrameError, PREFIX};
use serde::{Serialize, de::DeserializeOwned};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Sends one message as one write.
pub async fn send<T: Serialize>(out: &mut (impl AsyncWrite + Unpin), message: &T) -> Result<(), FrameError> {
    out.write_all(&frame::encode(message)?).await?;
    out.flush().await?;
    Ok(())
}

/// Receives one message. An end before its first byte is [`FrameError::Closed`]. Not to be dropped half way and called
/// again: what was read by then is lost.
pub async fn receive<T: DeserializeOwned>(input: &mut (impl AsyncRead + Unpin)) -> Result<T, FrameError> {
    let mut prefix = [0_u8; PREFIX];
    match input.read(&mut prefix).await? {
        0 => return Err(FrameError::Closed),
        have => {
            if let Some(rest) = prefix.get_mut(have..).filter(|rest| !rest.is_empty()) {
                input.read_exact(rest).await?;
            }
        }
    }
    let mut body = vec![0_u8; frame::body_len(prefix)?];
    input.read_exact(&mut body).await.map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => FrameError::Io(e),
        _ => e.into(),
    })?;
    frame::decode(&body)
}
