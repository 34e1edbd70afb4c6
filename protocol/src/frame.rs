//! Length-prefixed frames: a little-endian `u32` body length, then one postcard message.
//!
//! A peer may be hostile, so a length is checked against [`MAX_FRAME`] before a byte is allocated for it.

use serde::{Serialize, de::DeserializeOwned};
use std::io::{self, Read, Write};

/// Largest frame body either side accepts, in bytes. Bulk data travels in chunks of at most [`MAX_CHUNK`].
pub const MAX_FRAME: usize = 1 << 20;

/// Largest run of bytes (output, file content, standard input) put in one frame. One host write becomes at least one
/// vsock packet, so chunks are large; the kernel splits packets above 64 KiB itself.
pub const MAX_CHUNK: usize = 64 << 10;

/// Bytes of the length prefix.
pub const PREFIX: usize = 4;

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("frame of {0} bytes refused: the limit is {MAX_FRAME}")]
    TooLong(usize),
    #[error("frame not understood: {0}")]
    Malformed(#[from] postcard::Error),
    #[error("connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("connection closed by the peer")]
    Closed,
}

/// One message as the bytes that go on the wire, prefix included.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut wire = postcard::to_extend(message, vec![0_u8; PREFIX])?;
    let body = wire.len().saturating_sub(PREFIX);
    if body > MAX_FRAME {
        return Err(FrameError::TooLong(body));
    }
    let prefix = u32::try_from(body).map_err(|_| FrameError::TooLong(body))?.to_le_bytes();
    for (slot, byte) in wire.iter_mut().zip(prefix) {
        *slot = byte;
    }
    Ok(wire)
}

/// The body length a prefix announces, refused when above [`MAX_FRAME`].
pub fn body_len(prefix: [u8; PREFIX]) -> Result<usize, FrameError> {
    let len = usize::try_from(u32::from_le_bytes(prefix)).unwrap_or(usize::MAX);
    if len > MAX_FRAME { Err(FrameError::TooLong(len)) } else { Ok(len) }
}

/// One message from a frame's body. Bytes left over after the message are an error: both sides speak one version.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    let (message, rest) = postcard::take_from_bytes(body)?;
    if rest.is_empty() {
        Ok(message)
    } else {
        Err(FrameError::Malformed(postcard::Error::DeserializeBadEncoding))
    }
}

/// Writes one message with a single `write_all`, so that it is one packet where the socket allows it.
pub fn write<T: Serialize>(out: &mut impl Write, message: &T) -> Result<(), FrameError> {
    out.write_all(&encode(message)?)?;
    Ok(())
}

/// Reads one message. An end of file before the first byte is [`FrameError::Closed`].
pub fn read<T: DeserializeOwned>(input: &mut impl Read) -> Result<T, FrameError> {
    let mut prefix = [0_u8; PREFIX];
    let mut have = 0;
    while let Some(free) = prefix.get_mut(have..).filter(|free| !free.is_empty()) {
        match input.read(free) {
            Ok(0) if have == 0 => return Err(FrameError::Closed),
            Ok(0) => return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => have = have.saturating_add(n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    let mut body = vec![0; body_len(prefix)?];
    input.read_exact(&mut body)?;
    decode(&body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_the_wire() {
        let wire = encode(&("hello", 7_u32)).unwrap();
        let back: (String, u32) = read(&mut wire.as_slice()).unwrap();
        assert_eq!(back, ("hello".to_owned(), 7));
    }

    #[test]
    fn a_length_above_the_limit_is_refused_before_it_is_allocated() {
        let wire = u32::MAX.to_le_bytes();
        assert!(matches!(read::<u8>(&mut wire.as_slice()), Err(FrameError::TooLong(_))));
    }

    #[test]
    fn trailing_bytes_in_a_frame_are_refused() {
        let mut wire = encode(&1_u8).unwrap();
        wire[0] += 1;
        wire.push(0);
        assert!(matches!(read::<u8>(&mut wire.as_slice()), Err(FrameError::Malformed(_))));
    }

    #[test]
    fn a_cut_frame_is_an_error_and_an_end_between_frames_is_closed() {
        let wire = encode(&"abc").unwrap();
        assert!(matches!(read::<String>(&mut &wire[..wire.len() - 1]), Err(FrameError::Io(_))));
        assert!(matches!(read::<String>(&mut &wire[..2]), Err(FrameError::Io(_))));
        assert!(matches!(read::<String>(&mut &wire[..0]), Err(FrameError::Closed)));
    }
}
