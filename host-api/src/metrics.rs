//! Counters for `/metrics`, in Prometheus' text format.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// Upper bounds of the histograms' buckets, in milliseconds.
const BUCKETS: [u64; 12] = [5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 60_000];

#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS.len()],
    count: AtomicU64,
    sum_ms: AtomicU64,
}

impl Histogram {
    pub fn observe(&self, ms: u64) {
        for (bucket, bound) in self.buckets.iter().zip(BUCKETS) {
            if ms <= bound {
                bucket.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        self.sum_ms.fetch_add(ms, Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, help: &str) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        for (bucket, bound) in self.buckets.iter().zip(BUCKETS) {
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {}", bucket.load(Ordering::Relaxed));
        }
        let count = self.count.load(Ordering::Relaxed);
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}");
        let _ = writeln!(out, "{name}_sum {}\n{name}_count {count}", self.sum_ms.load(Ordering::Relaxed));
    }
}

#[derive(Debug, Default)]
pub struct Metrics {
    pub create_ms: Histogram,
    pub command_ms: Histogram,
    pub creates_failed: AtomicU64,
    pub commands: AtomicU64,
    pub commands_replayed: AtomicU64,
    pub release_retries: AtomicU64,
    pub requests: AtomicU64,
}

impl Metrics {
    pub fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub fn text(&self, states: &[(String, i64)], memory: (u64, u64)) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "# HELP bivouac_sandboxes Sandboxes that are not released, by state.");
        let _ = writeln!(out, "# TYPE bivouac_sandboxes gauge");
        for (state, count) in states {
            let _ = writeln!(out, "bivouac_sandboxes{{state=\"{state}\"}} {count}");
        }
        let gauges = [
            ("bivouac_memory_held_mib", "Host memory promised to machines.", memory.0),
            ("bivouac_memory_limit_mib", "Host memory that can be promised.", memory.1),
        ];
        for (name, help, value) in gauges {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        }
        let counters = [
            ("bivouac_http_requests_total", "HTTP requests taken.", &self.requests),
            ("bivouac_creates_failed_total", "Sandboxes that could not be made.", &self.creates_failed),
            ("bivouac_commands_total", "Commands accepted.", &self.commands),
            (
                "bivouac_commands_replayed_total",
                "Submissions answered with an earlier command.",
                &self.commands_replayed,
            ),
            ("bivouac_release_retries_total", "Releases that had to be tried again.", &self.release_retries),
        ];
        for (name, help, value) in counters {
            let value = value.load(Ordering::Relaxed);
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}");
        }
        self.create_ms.write(
            &mut out,
            "bivouac_create_ms",
            "From an accepted create to running, in milliseconds.",
        );
        self.command_ms.write(
            &mut out,
            "bivouac_command_ms",
            "From an accepted command to its end, in milliseconds.",
        );
        out
    }
}
