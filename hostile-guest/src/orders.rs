//! The kernel command line, as far as it is meant for this kernel.

use crate::machine;

/// `hdr.cmd_line_ptr` in `struct boot_params` (Documentation/arch/x86/boot.rst).
const CMD_LINE_PTR: u64 = 0x228;
/// `COMMAND_LINE_SIZE` on x86.
const LONGEST: usize = 2048;

pub struct Orders {
    attack: [u8; 32],
    pub seed: u64,
    /// None: the attack's own.
    pub count: Option<u64>,
}

impl Orders {
    pub fn read(zero_page: u64) -> Self {
        let at = u64::from(machine::load::<u32>(zero_page + CMD_LINE_PTR));
        let mut orders = Self { attack: [0; 32], seed: 0, count: None };
        let mut word = [0_u8; 64];
        let mut len = 0;
        for offset in 0..LONGEST as u64 {
            let byte: u8 = machine::load(at + offset);
            if byte == b' ' || byte == 0 {
                orders.take(&word[..len]);
                len = 0;
            } else if len < word.len() {
                word[len] = byte;
                len += 1;
            }
            if byte == 0 {
                break;
            }
        }
        orders
    }

    fn take(&mut self, word: &[u8]) {
        if let Some(name) = word.strip_prefix(b"attack=") {
            let len = name.len().min(self.attack.len());
            self.attack[..len].copy_from_slice(&name[..len]);
        } else if let Some(seed) = word.strip_prefix(b"seed=") {
            self.seed = number(seed);
        } else if let Some(count) = word.strip_prefix(b"count=") {
            self.count = Some(number(count));
        }
    }

    pub fn attack(&self) -> &[u8] {
        let len = self.attack.iter().position(|byte| *byte == 0).unwrap_or(self.attack.len());
        &self.attack[..len]
    }

    /// The same, for an attack that is part of another.
    pub fn with_count(&self, count: u64) -> Self {
        Self { attack: self.attack, seed: self.seed, count: Some(count) }
    }

    pub fn count(&self, otherwise: u64) -> u64 {
        self.count.unwrap_or(otherwise)
    }
}

fn number(digits: &[u8]) -> u64 {
    digits
        .iter()
        .fold(0, |sum: u64, digit| sum.wrapping_mul(10).wrapping_add(u64::from(digit.wrapping_sub(b'0'))))
}
