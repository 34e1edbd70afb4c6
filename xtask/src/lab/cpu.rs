//! One processor of this machine for each lab.
//!
//! QEMU 7.2 sets a bit in its word of pending interrupts without a lock when it enters a nested guest (`helper_vmrun`,
//! target/i386/tcg/sysemu/svm_helper.c). If its main loop sets another bit at that moment, on another processor, one of
//! the two is lost: an interrupt stays in the emulated APIC's IRR, nobody wakes the halted processor, and the lab stands
//! still. Free to use two processors, three labs on an idle machine stood still at their second, second and fourth guest;
//! held on one, 100 of 100 guests started, 40 of 40 too in a lab with two emulated processors, and none slower.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use rustix::fs::{FlockOperation, flock};
use rustix::thread::{CpuSet, sched_getaffinity};

#[derive(Debug)]
pub struct Cpu {
    pub only: CpuSet,
    /// Tells other labs that this one is taken.
    _lock: Option<File>,
}

impl Cpu {
    /// One that no other lab has, or, if all are taken, one like any other.
    pub fn take(folder: &Path) -> Result<Self> {
        let allowed = sched_getaffinity(None).context("cannot tell which processors there are")?;
        let numbers: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number)).collect();
        fs::create_dir_all(folder)?;
        for number in &numbers {
            let file = File::create(folder.join(format!("cpu-{number}")))?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                return Ok(Self { only: set_of(*number), _lock: Some(file) });
            }
        }
        let any = std::process::id() as usize % numbers.len().max(1);
        let number = numbers.get(any).ok_or_else(|| anyhow!("this machine has no processor for us"))?;
        Ok(Self { only: set_of(*number), _lock: None })
    }
}

fn set_of(number: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(number);
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lab_gets_a_processor_even_when_all_are_taken() {
        let folder = std::env::temp_dir().join(format!("xtask-cpu-{}", std::process::id()));
        let count = sched_getaffinity(None).unwrap().count() as usize;
        let labs: Vec<Cpu> = (0..=count).map(|_| Cpu::take(&folder).unwrap()).collect();
        assert!(labs.iter().all(|lab| lab.only.count() == 1));
        assert_eq!(labs.iter().filter(|lab| lab._lock.is_some()).count(), count);
        fs::remove_dir_all(&folder).unwrap();
    }
}
