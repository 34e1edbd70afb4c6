//! `bivouac doctor`: whether this host can run sandboxes, what slows it down, and what to change. It needs no daemon.

mod host;
mod vsock;

use serde::Serialize;
use std::{fmt::Write, path::Path};

/// One finding, good or bad.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// Short and stable, for programs.
    name: &'static str,
    ok: bool,
    /// Without it no guest runs here. What is not required costs speed, or a feature that the detail names.
    required: bool,
    /// What was found, in plain words.
    detail: String,
    /// What to do about it; nothing where all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Finding {
    fn good(name: &'static str, required: bool, detail: impl Into<String>) -> Self {
        Self { name, ok: true, required, detail: detail.into(), fix: None }
    }

    fn bad(name: &'static str, required: bool, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, ok: false, required, detail: detail.into(), fix: Some(fix.into()) }
    }
}

#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether guests can run here.
    pub fit: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    nanoseconds_per_instruction: Option<f64>,
    findings: Vec<Finding>,
}

/// Looks at everything. `data` is where sandboxes keep their disks.
pub fn examine(data: &Path) -> Report {
    let kvm = bivouac_vmm::probe::run();
    let speed = kvm.nanoseconds_per_instruction;
    let mut findings: Vec<Finding> = kvm.findings.into_iter().map(of_probe).collect();
    findings.extend([
        host::vhost_vsock(),
        host::cgroup_v2(),
        host::cgroup_controllers(),
        host::tap(),
        host::nftables(),
        host::reflinks(data),
        vsock::other_listeners(),
        host::favordynmods(),
        host::nx_huge_pages(),
    ]);
    let fit = findings.iter().all(|finding| finding.ok || !finding.required);
    Report { fit, nanoseconds_per_instruction: speed, findings }
}

fn of_probe(found: bivouac_vmm::probe::Finding) -> Finding {
    match found.problem {
        None => Finding::good(found.name, true, format!("{}: fine", found.what)),
        Some(why) => Finding::bad(
            found.name,
            true,
            format!("{}: {why}", found.what),
            match found.name {
                "kvm_device" => "see above; then run this again",
                "kvm_features" => {
                    "use a Linux kernel of version 6.1 or later, with KVM built in or as a module"
                }
                _ => {
                    "use a host whose processor runs guests itself: bare metal with VT-x or AMD-V switched on, or a \
                     virtual machine with nested virtualization"
                }
            },
        ),
    }
}

impl Report {
    /// For people.
    pub fn render(&self) -> String {
        let mut out = String::new();
        let mut said = None;
        for finding in &self.findings {
            let mark = match (finding.ok, finding.required) {
                (true, _) => "ok     ",
                (false, true) => "MISSING",
                (false, false) => "advice ",
            };
            let _ = writeln!(out, "{mark}  {:<20} {}", finding.name, finding.detail);
            // What several findings have in common is said after the first of them.
            if let Some(fix) = finding.fix.as_ref().filter(|fix| said != Some(*fix)) {
                said = Some(fix);
                let _ = writeln!(out, "{:31}-> {fix}", "");
            }
        }
        if let Some(ns) = self.nanoseconds_per_instruction {
            let _ = writeln!(out, "\nA guest's kernel runs at {ns:.1} ns an instruction.");
        }
        let verdict =
            if self.fit { "This host can run sandboxes." } else { "This host cannot run sandboxes." };
        let _ = writeln!(out, "{verdict}");
        out
    }
}
