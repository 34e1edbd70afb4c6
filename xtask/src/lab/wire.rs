//! What the two halves of the lab say to each other over one virtio-serial port.
//!
//! A message is one byte of kind, four of length (little endian), and that many bytes. Streams keep their boundaries
//! from each other and every byte of their own; the end of a stream and the exit status are messages like any other.

use std::io::{Read, Write};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::terminal;

/// Name of the port, as /sys/class/virtio-ports shows it.
pub const PORT: &str = "bivouac.lab";

/// Longest message. Larger than any that is sent; a length above it means that the two sides lost step.
const MAX: usize = 1 << 20;

/// Bytes read from a stream at once.
pub const CHUNK: usize = 32 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Inside to outside, once a second: the lab runs.
    Alive = 0,
    Stdout = 1,
    Stderr = 2,
    /// Inside to outside, last: the exit status as four bytes.
    Exit = 3,
    /// Outside to inside, first: a [`Job`] as JSON.
    Job = 4,
    /// Outside to inside. An empty one ends the stream.
    Stdin = 5,
}

impl Kind {
    fn from(byte: u8) -> Option<Self> {
        [Self::Alive, Self::Stdout, Self::Stderr, Self::Exit, Self::Job, Self::Stdin]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// What to run inside.
#[derive(Debug, Serialize, Deserialize)]
pub struct Job {
    pub argv: Vec<String>,
    pub env: Vec<(String, String)>,
    pub cwd: String,
    /// Wall-clock time, in nanoseconds since 1970-01-01 UTC.
    pub now_ns: u64,
    /// Give the command a terminal, rather than three pipes.
    pub terminal: Option<terminal::Size>,
}

pub fn send(to: &mut impl Write, kind: Kind, data: &[u8]) -> Result<()> {
    let length = u32::try_from(data.len()).context("a message of more than 4 GiB")?;
    let mut message = Vec::with_capacity(5 + data.len());
    message.push(kind as u8);
    message.extend_from_slice(&length.to_le_bytes());
    message.extend_from_slice(data);
    to.write_all(&message)?;
    Ok(to.flush()?)
}

pub fn receive(from: &mut impl Read) -> Result<(Kind, Vec<u8>)> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let [kind, length @ ..] = head;
    let length = u32::from_le_bytes(length) as usize;
    let Some(kind) = Kind::from(kind).filter(|_| length <= MAX) else {
        bail!("not a message: kind {kind}, {length} bytes");
    };
    let mut data = vec![0; length];
    from.read_exact(&mut data)?;
    Ok((kind, data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_every_byte_and_their_order() {
        let mut wire = Vec::new();
        let every_byte: Vec<u8> = (0..=255).collect();
        send(&mut wire, Kind::Stdout, &every_byte).unwrap();
        send(&mut wire, Kind::Stdin, b"").unwrap();
        let mut wire = wire.as_slice();
        assert_eq!(receive(&mut wire).unwrap(), (Kind::Stdout, every_byte));
        assert_eq!(receive(&mut wire).unwrap(), (Kind::Stdin, Vec::new()));
        assert!(receive(&mut wire).is_err());
    }

    #[test]
    fn bytes_that_are_no_message_are_refused() {
        assert!(receive(&mut [9, 0, 0, 0, 0].as_slice()).is_err());
        assert!(receive(&mut [1, 255, 255, 255, 255].as_slice()).is_err());
    }
}
