//! Whether this host's KVM can run a Linux guest, found out in well under half a second by running some.
//!
//! A `/dev/kvm` that opens says little: there are hosts where it runs guests' user code natively and emulates their
//! kernels, a thousand times too slowly and with holes. So each probe is a guest of a few bytes of machine code that
//! does one thing every Linux kernel does, and says which of them this host cannot.

mod guest;

use guest::{Guest, Outcome};
use kvm_ioctls::{Cap, Kvm};

/// One finding.
#[derive(Debug, Clone)]
pub struct Finding {
    /// Short and stable, for programs.
    pub name: &'static str,
    /// What was looked at, for people.
    pub what: &'static str,
    /// Nothing, or what is wrong and what that means.
    pub problem: Option<String>,
}

#[derive(Debug, Clone)]
pub struct Report {
    pub findings: Vec<Finding>,
    /// Nanoseconds that one instruction of a guest's kernel takes.
    pub nanoseconds_per_instruction: Option<f64>,
}

impl Report {
    /// Whether guests can run here.
    pub fn fit(&self) -> bool {
        self.findings.iter().all(|finding| finding.problem.is_none())
    }

    /// The first thing that stands in the way.
    pub fn first_problem(&self) -> Option<String> {
        self.findings.iter().find_map(|f| f.problem.as_ref().map(|why| format!("{}: {why}", f.what)))
    }
}

/// Natively an instruction takes about a third of a nanosecond, under nested emulation about one; where kernel mode is
/// emulated instruction by instruction, hundreds.
const SLOWEST_NS_PER_INSTRUCTION: f64 = 50.0;
const LOOPS: u64 = 50_000;

/// Name, what it looks at, the guest, and what is wrong with how it ended.
type Probe = (&'static str, &'static str, fn() -> Guest, fn(&Guest, &Outcome) -> Option<String>);

/// Runs every probe. What needs an earlier one to have worked is left out when it has not.
pub fn run() -> Report {
    let mut report = Report { findings: Vec::new(), nanoseconds_per_instruction: None };
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(e) => {
            report.add("kvm_device", "/dev/kvm", Some(match e.errno() {
                libc::ENOENT => "it is not there: load kvm_intel or kvm_amd, and switch virtualization on in the firmware"
                    .into(),
                libc::EACCES => "you may not open it: run as root, or join the group kvm".into(),
                _ => format!("cannot be opened: {e}"),
            }));
            return report;
        }
    };
    report.add("kvm_device", "/dev/kvm", None);
    report.add("kvm_features", "KVM's interfaces", missing_interfaces(&kvm));
    let probes: [Probe; 5] = [
        (
            "syscall",
            "SYSCALL from a guest's ring 3 to its ring 0",
            guest::syscall,
            |_, outcome| match outcome {
                Outcome::Port(cs) if cs & 3 == 0 => None,
                other => {
                    Some(format!("the guest did not arrive in ring 0 ({other}); no Linux program could run"))
                }
            },
        ),
        ("cmpxchg16b", "cmpxchg16b in a guest's kernel", guest::cmpxchg16b, |guest, outcome| match outcome {
            Outcome::Port(_) if guest.data(0) == 1 => None,
            other => Some(not_run("cmpxchg16b", other)),
        }),
        ("xsave", "xsave in a guest's kernel", guest::xsave, |guest, outcome| match outcome {
            Outcome::Port(_) if guest.data(0) != guest::POISON => None,
            other => Some(not_run("xsave", other)),
        }),
        ("popcnt", "popcnt in a guest's kernel", guest::popcnt, |_, outcome| match outcome {
            Outcome::Port(8) => None,
            other => Some(not_run("popcnt", other)),
        }),
        ("int3", "int3 in a guest's kernel", guest::int3, |_, outcome| match outcome {
            Outcome::Port(guest::INT3_ARRIVED) => None,
            other => Some(not_run("int3", other)),
        }),
    ];
    for (name, what, make, check) in probes {
        let problem = match make().run(&kvm) {
            Ok((guest, outcome, _)) => check(&guest, &outcome),
            Err(e) => Some(e.to_string()),
        };
        report.add(name, what, problem);
    }
    let what = "the speed of a guest's kernel";
    match speed(&kvm) {
        Ok(each) => {
            report.nanoseconds_per_instruction = Some(each);
            let slow = each > SLOWEST_NS_PER_INSTRUCTION;
            report.add(
                "speed",
                what,
                slow.then(|| {
                    format!(
                        "{each:.0} ns an instruction: its kernel mode is emulated, not run by the processor"
                    )
                }),
            );
        }
        Err(why) => report.add("speed", what, Some(why)),
    }
    report
}

/// Nanoseconds for each instruction of a loop, without what it takes to get in and out.
fn speed(kvm: &Kvm) -> Result<f64, String> {
    let time = |rounds| match guest::count_down(rounds).run(kvm) {
        Ok((_, Outcome::Port(_), took)) => Ok(took),
        Ok((_, other, _)) => Err(not_run("a loop", &other)),
        Err(e) => Err(e.to_string()),
    };
    let overhead = time(1)?;
    // The quickest of a few: what disturbs a run only ever makes it longer.
    let mut quickest = time(LOOPS)?;
    for _ in 0..2 {
        quickest = quickest.min(time(LOOPS)?);
    }
    let took = quickest.saturating_sub(overhead);
    // Two instructions a round.
    Ok(took.as_nanos() as f64 / (2 * LOOPS) as f64)
}

fn not_run(instruction: &str, outcome: &Outcome) -> String {
    format!("{instruction} does not work there ({outcome}); Linux uses it long before its first program")
}

fn missing_interfaces(kvm: &Kvm) -> Option<String> {
    let needed = [
        (Cap::UserMemory, "user memory"),
        (Cap::Irqchip, "interrupt controller"),
        (Cap::Irqfd, "irqfd"),
        (Cap::Ioeventfd, "ioeventfd"),
        (Cap::ImmediateExit, "immediate exit"),
        (Cap::TscDeadlineTimer, "TSC deadline timer"),
    ];
    let missing: Vec<_> =
        needed.iter().filter(|(cap, _)| !kvm.check_extension(*cap)).map(|(_, name)| *name).collect();
    (!missing.is_empty()).then(|| format!("this kernel's KVM lacks: {}", missing.join(", ")))
}

impl Report {
    fn add(&mut self, name: &'static str, what: &'static str, problem: Option<String>) {
        self.findings.push(Finding { name, what, problem });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holds on any host, whatever it can do: the probes end, in time, and the verdict follows from them.
    #[test]
    fn probing_ends_quickly_and_always_has_a_verdict() {
        let report = run();
        assert!(!report.findings.is_empty());
        assert_eq!(report.fit(), report.first_problem().is_none());
    }
}
