//! What a monitor's process holds of the host's memory, from `/proc/PID/smaps`.

use anyhow::{Context, Result};
use std::fs;

/// KiB.
#[derive(Debug, Default, Clone, Copy)]
pub struct Held {
    /// Private pages outside guest memory: what one more machine costs for its monitor.
    pub own: f64,
    /// All that is resident.
    pub resident: f64,
}

/// `guest_mib`: guest memory is the run of neighbouring mappings that is that long.
pub fn of(pid: u32, guest_mib: u32) -> Result<Held> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).context("cannot read smaps")?;
    Ok(parse(&smaps, guest_mib))
}

fn parse(smaps: &str, guest_mib: u32) -> Held {
    let mut held = Held::default();
    let mappings = mappings(smaps);
    let guest = guest_run(&mappings, u64::from(guest_mib) << 20);
    for mapping in &mappings {
        held.resident += mapping.rss;
        if !guest.is_some_and(|(start, end)| mapping.start >= start && mapping.end <= end) {
            held.own += mapping.private;
        }
    }
    held
}

#[derive(Debug)]
struct Mapping {
    start: u64,
    end: u64,
    rss: f64,
    private: f64,
}

fn mappings(smaps: &str) -> Vec<Mapping> {
    let mut all: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let first = line.split(' ').next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-')
            && let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16))
        {
            all.push(Mapping { start, end, rss: 0.0, private: 0.0 });
            continue;
        }
        let Some(mapping) = all.last_mut() else { continue };
        let value = || line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0.0);
        match first {
            "Rss:" => mapping.rss += value(),
            "Private_Clean:" | "Private_Dirty:" => mapping.private += value(),
            _ => {}
        }
    }
    all
}

/// The run of touching mappings that is as long as guest memory.
fn guest_run(mappings: &[Mapping], bytes: u64) -> Option<(u64, u64)> {
    for (index, first) in mappings.iter().enumerate() {
        let mut end = first.start;
        for mapping in mappings.iter().skip(index) {
            if mapping.start != end || end - first.start >= bytes {
                break;
            }
            end = mapping.end;
        }
        if end - first.start == bytes {
            return Some((first.start, end));
        }
    }
    None
}
