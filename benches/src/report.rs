//! Percentiles of the samples, for people and for programs.

use crate::sample::Sample;
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, fmt::Write as _};

#[derive(Debug, Default)]
struct Series(Vec<f64>);

impl Series {
    /// By the nearest rank.
    fn percentile(&self, percent: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (percent / 100.0 * sorted.len() as f64).ceil().max(1.0) as usize;
        sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
    }

    fn json(&self) -> Value {
        json!({
            "p50": self.percentile(50.0),
            "p95": self.percentile(95.0),
            "p99": self.percentile(99.0),
            "n": self.0.len(),
        })
    }
}

#[derive(Debug)]
pub struct Report {
    host: Value,
    runs: u32,
    /// System, then figure.
    systems: BTreeMap<String, BTreeMap<&'static str, Series>>,
    counts: BTreeMap<&'static str, Series>,
    phases: Vec<(&'static str, Series)>,
}

impl Report {
    pub fn new(runs: u32, memory_mib: u32) -> Self {
        let host = host(memory_mib);
        Self { host, runs, systems: BTreeMap::new(), counts: BTreeMap::new(), phases: Vec::new() }
    }

    pub fn add(&mut self, system: &str, sample: Sample) {
        let figures = self.systems.entry(system.to_owned()).or_default();
        let single = [
            ("cold_hello_ms", sample.cold_hello_ms),
            ("cold_exec_ms", sample.cold_exec_ms),
            ("restore_exec_ms", sample.restore_exec_ms),
            ("overhead_kib", sample.overhead_kib),
            ("resident_kib", sample.resident_kib),
        ];
        for (name, value) in single {
            if let Some(value) = value {
                figures.entry(name).or_default().0.push(value);
            }
        }
        if !sample.exec_ms.is_empty() {
            figures.entry("exec_ms").or_default().0.extend(sample.exec_ms);
        }
        for (name, value) in sample.counts {
            self.counts.entry(name).or_default().0.push(value);
        }
        for (name, value) in sample.phases {
            match self.phases.iter_mut().find(|(known, _)| *known == name) {
                Some((_, series)) => series.0.push(value),
                None => self.phases.push((name, Series(vec![value]))),
            }
        }
    }

    pub fn table(&self) -> String {
        let mut text = format!("\n{} runs of each, in turn. Host: {}\n\n", self.runs, self.host);
        let _ = writeln!(
            text,
            "{:<14} {:<16} {:>10} {:>10} {:>10} {:>6}",
            "system", "figure", "p50", "p95", "p99", "n"
        );
        for (system, figures) in &self.systems {
            for (name, series) in figures {
                let _ = writeln!(text, "{system:<14} {name:<16} {}", row(series));
            }
        }
        let _ = writeln!(text);
        for (name, series) in &self.counts {
            let _ = writeln!(text, "{name:<31} {}", row(series));
        }
        let _ = writeln!(text, "\nphases, in ms from the request (the monitor's own from its start):");
        for (name, series) in &self.phases {
            let _ = writeln!(text, "{name:<31} {}", row(series));
        }
        let _ = writeln!(text, "\nratios of medians:");
        for (name, value) in self.ratios() {
            let _ = writeln!(text, "{name:<55} {value:.3}");
        }
        text
    }

    /// Each of our figures that has a target, against what it is held to.
    fn ratios(&self) -> Vec<(String, f64)> {
        let median = |system: &str, figure: &str| {
            self.systems.get(system)?.get(figure).map(|series| series.percentile(50.0))
        };
        let ours = |figure| median("bivouac", figure);
        let mut ratios = Vec::new();
        for peer in self.systems.keys().filter(|name| *name != "bivouac") {
            for (figure, against) in [
                ("cold_hello_ms", "cold_hello_ms"),
                ("cold_exec_ms", "cold_exec_ms"),
                ("restore_exec_ms", "cold_exec_ms"),
                ("restore_exec_ms", "restore_exec_ms"),
                ("exec_ms", "exec_ms"),
                ("overhead_kib", "overhead_kib"),
            ] {
                if let (Some(ours), Some(theirs)) = (ours(figure), median(peer, against)) {
                    ratios.push((format!("bivouac {figure} / {peer} {against}"), ours / theirs));
                }
            }
        }
        ratios
    }

    pub fn json(&self) -> String {
        let figures = |figures: &BTreeMap<&str, Series>| -> Value {
            figures
                .iter()
                .map(|(name, series)| ((*name).to_owned(), series.json()))
                .collect::<Map<_, _>>()
                .into()
        };
        let systems: Map<String, Value> =
            self.systems.iter().map(|(name, system)| (name.clone(), figures(system))).collect();
        let phases: Map<String, Value> =
            self.phases.iter().map(|(name, series)| ((*name).to_owned(), series.json())).collect();
        let counts: Map<String, Value> = self
            .counts
            .iter()
            .map(|(name, series)| ((*name).to_owned(), series.percentile(50.0).into()))
            .collect();
        let ratios: Map<String, Value> =
            self.ratios().into_iter().map(|(name, value)| (name, value.into())).collect();
        let report = json!({
            "host": self.host,
            "runs": self.runs,
            "systems": systems,
            "counts": counts,
            "phases": phases,
            "ratios": ratios,
        });
        format!("{report:#}\n")
    }
}

fn row(series: &Series) -> String {
    format!(
        "{:>10.2} {:>10.2} {:>10.2} {:>6}",
        series.percentile(50.0),
        series.percentile(95.0),
        series.percentile(99.0),
        series.0.len()
    )
}

/// What the figures depend on.
fn host(memory_mib: u32) -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map(|(_, m)| m.to_owned());
    json!({
        "kernel": read("/proc/sys/kernel/osrelease"),
        "processor": model,
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "emulated": cpuinfo.contains("hypervisor"),
        "huge_pages": read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "guest_vcpus": 1,
        "guest_memory_mib": memory_mib,
    })
}
