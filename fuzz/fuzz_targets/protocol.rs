//! Frames and messages, as a guest, a daemon or a monitor could send them.
//!
//! An input is one byte that chooses the message, one that says in what pieces the bytes arrive, and the bytes: a frame with
//! its length, or for the control socket one packet.
//!
//! What must hold: a message that is understood is the same after it went over the wire once more, and what is read leaves
//! nothing behind; nothing is allocated by the measure of a length that was merely announced (the library's allocator has a limit).

#![no_main]

use bivouac_fuzz::Input;
use bivouac_protocol::{
    agent::{Configure, Ended, Hello, More, Open, Reply},
    frame,
    monitor::{self, FromMonitor, ToMonitor},
};
use libfuzzer_sys::fuzz_target;
use serde::{Serialize, de::DeserializeOwned};
use std::{fmt::Debug, io, io::Read};

/// Gives no more than so many bytes at a time.
struct Pieces<'a> {
    bytes: &'a [u8],
    size: usize,
}

impl Read for Pieces<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = self.size.min(out.len());
        self.bytes.read(&mut out[..len])
    }
}

fn framed<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8], size: usize) {
    let mut input = Pieces { bytes, size };
    while let Ok(message) = frame::read::<T>(&mut input) {
        let wire = match frame::encode(&message) {
            Ok(wire) => wire,
            Err(e) => panic!("what was read cannot be written: {e}"),
        };
        let mut again = wire.as_slice();
        assert_eq!(frame::read::<T>(&mut again).expect("our own encoding"), message);
        assert!(again.is_empty());
    }
}

fn packet<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) {
    if let Ok(message) = monitor::decode::<T>(bytes) {
        let wire = monitor::encode(&message).expect("what was read can be written");
        assert_eq!(monitor::decode::<T>(&wire).expect("our own encoding"), message);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    let (kind, size) = (input.byte(), usize::from(input.byte()) + 1);
    let bytes = input.rest();
    match kind % 8 {
        0 => framed::<Open>(bytes, size),
        1 => framed::<More>(bytes, size),
        2 => framed::<Reply>(bytes, size),
        3 => framed::<Hello>(bytes, size),
        4 => framed::<Configure>(bytes, size),
        5 => framed::<Ended>(bytes, size),
        6 => packet::<ToMonitor>(bytes),
        _ => packet::<FromMonitor>(bytes),
    }
});
