//! Whether this host has room for one more machine.
//!
//! Memory is promised, not hoped for: the sum of what all machines may use never passes what the host has, so that one
//! tenant's machine is never the reason another's is killed.

use crate::ids::SandboxId;
use crate::sync::lock;
use std::collections::HashMap;
use std::sync::Mutex;

#[derive(Debug)]
pub struct Admission {
    limit_mib: u64,
    held: Mutex<HashMap<SandboxId, u64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{wanted_mib} MiB are wanted, {free_mib} of {limit_mib} MiB are free on this host")]
pub struct Full {
    pub wanted_mib: u64,
    pub free_mib: u64,
    pub limit_mib: u64,
}

impl Admission {
    pub fn new(limit_mib: u64) -> Self {
        Self { limit_mib, held: Mutex::default() }
    }

    pub fn admit(&self, id: &SandboxId, mib: u64) -> Result<(), Full> {
        let mut held = lock(&self.held);
        let used: u64 = held.values().sum();
        let free_mib = self.limit_mib.saturating_sub(used);
        if mib > free_mib {
            return Err(Full { wanted_mib: mib, free_mib, limit_mib: self.limit_mib });
        }
        held.insert(id.clone(), mib);
        Ok(())
    }

    /// Counts a machine that is there already.
    pub fn take_over(&self, id: &SandboxId, mib: u64) {
        lock(&self.held).insert(id.clone(), mib);
    }

    pub fn free(&self, id: &SandboxId) {
        lock(&self.held).remove(id);
    }

    /// (held, limit), in MiB.
    pub fn usage(&self) -> (u64, u64) {
        (lock(&self.held).values().sum(), self.limit_mib)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_promised_once_and_given_back_once() {
        let admission = Admission::new(1000);
        let (a, b) = (SandboxId::new(), SandboxId::new());
        admission.admit(&a, 600).unwrap();
        assert_eq!(admission.admit(&b, 600).unwrap_err().free_mib, 400);
        admission.free(&a);
        admission.free(&a);
        admission.admit(&b, 600).unwrap();
    }
}
