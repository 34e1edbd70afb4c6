//! The state file: a header of fixed size, and what it vouches for.
//!
//! ```text
//!  magic (8) │ version (4) │ CRC-32 of the body (4) │ length of the body (8) │ body: postcard
//! ```
//! All numbers are little-endian.

use super::MachineState;
use crate::Error;

const MAGIC: [u8; 8] = *b"bivouac\0";
/// Of everything below the header. A monitor takes up the snapshots of its own version and no others: templates are
/// made anew when the product is, and a format that is never converted cannot be converted wrongly.
pub const VERSION: u32 = 1;
const HEADER: usize = 24;
/// Largest state file. A machine with 32 processors takes less than 1 MiB.
pub const CAP: usize = 4 << 20;

pub fn encode(state: &MachineState) -> Result<Vec<u8>, Error> {
    let body = postcard::to_allocvec(state).map_err(|e| refuse(&e.to_string()))?;
    let mut file = Vec::with_capacity(HEADER + body.len());
    file.extend_from_slice(&MAGIC);
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
    file.extend_from_slice(&(body.len() as u64).to_le_bytes());
    file.extend_from_slice(&body);
    if file.len() > CAP {
        return Err(refuse("the machine's state is above the size limit"));
    }
    Ok(file)
}

pub fn decode(file: &[u8]) -> Result<MachineState, Error> {
    let (header, body) =
        file.split_at_checked(HEADER).ok_or_else(|| refuse("the state file is shorter than its header"))?;
    let field = |start: usize| header.get(start..).unwrap_or_default();
    let word = |start| field(start).first_chunk().copied().map_or(0, u32::from_le_bytes);
    if !header.starts_with(&MAGIC) {
        return Err(refuse("not a state file"));
    }
    let version = word(8);
    if version != VERSION {
        return Err(refuse(&format!("it has version {version}, this monitor takes up version {VERSION}")));
    }
    let length = field(16).first_chunk().copied().map_or(0, u64::from_le_bytes);
    if length != body.len() as u64 {
        return Err(refuse(&format!(
            "the state file holds {} bytes of state where {length} were written: it is incomplete or damaged",
            body.len()
        )));
    }
    if crc32fast::hash(body) != word(12) {
        return Err(refuse("the state file is damaged: its checksum does not fit"));
    }
    postcard::from_bytes(body).map_err(|e| refuse(&format!("the state file cannot be understood: {e}")))
}

fn refuse(why: &str) -> Error {
    Error::Snapshot(why.to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::snapshot::{DeviceState, MemoryLayout};
    use proptest::prelude::*;

    pub fn state() -> MachineState {
        MachineState {
            memory: MemoryLayout::default(),
            vcpus: Vec::new(),
            irqchips: vec![Default::default(); 3],
            pit: Default::default(),
            clock: Default::default(),
            devices: vec![DeviceState { id: 19, transport: Default::default() }],
        }
    }

    #[test]
    fn a_state_comes_back_as_it_was_written() {
        let file = encode(&state()).unwrap();
        assert_eq!(encode(&decode(&file).unwrap()).unwrap(), file);
    }

    #[test]
    fn each_way_to_be_wrong_is_told() {
        let file = encode(&state()).unwrap();
        let changed = |at: usize, to: u8| {
            let mut file = file.clone();
            file[at] = to;
            decode(&file).unwrap_err().to_string()
        };
        assert!(changed(0, b'x').contains("not a state file"));
        assert!(changed(8, 99).contains("version 99"));
        assert!(changed(16, 1).contains("incomplete or damaged"));
        assert!(changed(HEADER + 3, 0xaa).contains("checksum"));
        assert!(decode(&file[..file.len() - 1]).unwrap_err().to_string().contains("incomplete"));
        assert!(decode(&file[..10]).unwrap_err().to_string().contains("shorter"));
        assert!(decode(&[]).is_err());
    }

    proptest! {
        /// One flipped bit, anywhere.
        #[test]
        fn no_flipped_bit_goes_unnoticed(position in any::<prop::sample::Index>(), bit in 0..8_u8) {
            let mut file = encode(&state()).unwrap();
            let at = position.index(file.len());
            file[at] ^= 1 << bit;
            prop_assert!(decode(&file).is_err());
        }

        /// A body that carries a right checksum and is still nonsense.
        #[test]
        fn a_made_up_body_is_refused_or_understood_and_never_a_panic(body in prop::collection::vec(any::<u8>(), 0..512)) {
            let mut file = MAGIC.to_vec();
            file.extend_from_slice(&VERSION.to_le_bytes());
            file.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
            file.extend_from_slice(&(body.len() as u64).to_le_bytes());
            file.extend_from_slice(&body);
            let _ = decode(&file);
        }
    }
}
