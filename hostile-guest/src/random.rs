//! Random numbers that are the same for the same seed: xorshift64*.

use core::cell::Cell;

pub struct Random(Cell<u64>);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Zero would stay zero.
        Self(Cell::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1))
    }

    pub fn word(&self) -> u64 {
        let mut state = self.0.get();
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        self.0.set(state);
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `limit`, which is not 0.
    pub fn below(&self, limit: u64) -> u64 {
        (self.word() >> 16) % limit
    }

    pub fn of<T: Copy>(&self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Numbers that checks are made for: near powers of two, near the ends, or anything.
    pub fn nasty(&self) -> u64 {
        let near = 1_u64 << self.below(64);
        match self.below(6) {
            0 => near.wrapping_sub(1),
            1 => near,
            2 => near.wrapping_add(self.below(4096)),
            3 => u64::MAX - self.below(4096),
            4 => self.below(512),
            _ => self.word(),
        }
    }
}
