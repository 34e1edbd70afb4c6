//! Our own monitor, started by the code that the daemon starts it with.

use crate::{
    Setting, guest,
    guest::{Announced, Heard},
    memory, ms,
    sample::Sample,
};
use anyhow::{Context, Result, bail};
use bivouac_protocol::{
    agent::PORT_PARAMETER,
    monitor::{FromMonitor, ToMonitor},
};
use bivouacd::{
    agent::Expected,
    ids::SandboxId,
    lifecycle::Scope,
    machine::{
        Machine, MachineSpec, Machines, SavedMachine,
        real::{RealMachines, Settings},
    },
};
use std::{path::PathBuf, time::Instant};

/// Added to a guest's address for the clone that is watched.
const LEARNER: u32 = 10_000;

pub struct Bivouac {
    machines: RealMachines,
    setting: Setting,
    port: u32,
    saved: PathBuf,
}

impl Bivouac {
    pub fn empty(setting: &Setting, announced: &Announced) -> Result<Self> {
        let machines = RealMachines::new(Settings {
            data_dir: setting.folder.join("data"),
            prefix: setting.prefix.clone(),
            instance: format!("bench-{}", std::process::id()),
            console: std::env::var_os("BIVOUAC_BENCH_CONSOLE").is_some(),
        })?;
        let saved = setting.folder.join("saved");
        Ok(Self { machines, setting: setting.clone(), port: announced.port, saved })
    }

    /// Boots one machine, lets it settle, and saves it for the restores to come.
    pub async fn new(setting: &Setting, announced: &Announced, cid: u32) -> Result<Self> {
        let this = Self::empty(setting, announced)?;
        let spec = this.spec(cid, false);
        this.machines.prepare(&spec).await?;
        let mut expected = announced.expect(cid);
        let mut machine = this.machines.launch(&spec).await?;
        let Heard { channel, .. } = this.hello(announced, &mut expected, &mut machine, &spec.id).await?;
        announced.configure(cid, channel).await?;
        // Runs once what every first command runs, so that a clone finds it in its page cache.
        guest::exec(cid, "warm", &["/bin/true"]).await?;
        this.machines.save(&spec.id, &machine, &this.saved).await.with_context(|| this.log(&spec.id))?;
        this.machines.release(&spec.id, Scope::Everything).await?;
        this.learn(announced, cid + LEARNER).await?;
        Ok(this)
    }

    /// Watches one clone, as the preparation of a template does, so that the others can be spared its page faults.
    async fn learn(&self, announced: &Announced, cid: u32) -> Result<()> {
        let mut spec = self.spec(cid, true);
        let saved = spec.saved.as_mut().context("a clone of nothing")?;
        saved.record = true;
        saved.forget()?;
        let saved = saved.clone();
        self.machines.prepare(&spec).await?;
        let mut expected = announced.expect(cid);
        let mut machine = self.machines.launch(&spec).await?;
        let Heard { channel, .. } = self.hello(announced, &mut expected, &mut machine, &spec.id).await?;
        announced.configure(cid, channel).await?;
        guest::exec(cid, "first", &["/bin/true"]).await?;
        let pages = saved.learn(i32::try_from(self.pid(&spec.id)?)?)?;
        eprintln!("a clone touches {pages} pages up to the end of its first command");
        self.machines.release(&spec.id, Scope::Everything).await?;
        Ok(())
    }

    /// What the kernel of a machine that boots with `parameters` has to say.
    pub async fn kernel_log(&self, announced: &Announced, cid: u32, parameters: &str) -> Result<String> {
        let mut spec = self.spec(cid, false);
        spec.cmdline = format!("{} {parameters}", spec.cmdline);
        self.machines.prepare(&spec).await?;
        let mut expected = announced.expect(cid);
        let mut machine = self.machines.launch(&spec).await?;
        let Heard { channel, .. } = self.hello(announced, &mut expected, &mut machine, &spec.id).await?;
        announced.configure(cid, channel).await?;
        let log = guest::exec(cid, "log", &["dmesg"]).await?;
        self.machines.release(&spec.id, Scope::Everything).await?;
        Ok(String::from_utf8_lossy(&log.stdout).into_owned())
    }

    fn spec(&self, cid: u32, saved: bool) -> MachineSpec {
        MachineSpec {
            id: SandboxId::new(),
            vcpus: 1,
            memory_mib: self.setting.memory_mib,
            disk_mib: 1024,
            cid,
            root: self.setting.root.clone(),
            saved: saved.then(|| SavedMachine { folder: self.saved.clone(), verify: false, record: false }),
            cmdline: format!("{PORT_PARAMETER}={}", self.port),
        }
    }

    async fn hello(
        &self,
        announced: &Announced,
        expected: &mut Expected,
        machine: &mut Machine,
        id: &SandboxId,
    ) -> Result<Heard> {
        let heard = tokio::select! {
            heard = announced.hello(expected) => heard,
            end = machine.ended() => Err(anyhow::anyhow!("the machine ended: {}", end.reason().detail)),
        };
        heard.with_context(|| self.log(id))
    }

    /// What the monitor had to say, for an error.
    fn log(&self, id: &SandboxId) -> String {
        let path = bivouacd::machine::log_path(&self.setting.folder.join("data"), id.as_str());
        format!("the monitor's log: {}", std::fs::read_to_string(path).unwrap_or_default().trim())
    }

    pub async fn cold(&self, announced: &Announced, cid: u32) -> Result<Sample> {
        let spec = self.spec(cid, false);
        self.machines.prepare(&spec).await?;
        let mut expected = announced.expect(cid);
        // Mounts what they are read from, if need be, before the clock runs.
        kvm_statistics();
        let begun = Instant::now();
        let mut machine = self.machines.launch(&spec).await?;
        let launched = ms(begun);
        let Heard { at, uptime_ms, channel } =
            self.hello(announced, &mut expected, &mut machine, &spec.id).await?;
        let hello = at.duration_since(begun).as_secs_f64() * 1000.0;
        let exits = exits(&machine).await?;
        let kernel = kvm_statistics();
        announced.configure(cid, channel).await?;
        let configured = ms(begun);
        guest::exec(cid, "first", &["/bin/true"]).await?;
        let mut sample =
            Sample { cold_hello_ms: Some(hello), cold_exec_ms: Some(ms(begun)), ..Sample::default() };
        let faults = faults(self.pid(&spec.id)?)?;
        sample.counts.extend([("monitor_exits_to_hello", exits as f64), ("pages_faulted_to_exec", faults)]);
        sample.counts.extend(kernel);
        sample.phases.push(("cold: launch", launched));
        if let Some(booted) = machine.booted() {
            sample.phases.extend(phases(&booted, true));
        }
        sample.phases.push(("cold: hello, by the guest's clock", uptime_ms));
        sample.phases.extend([("cold: hello", hello), ("cold: configured", configured)]);
        self.finish(&spec, cid, &mut sample, true).await?;
        Ok(sample)
    }

    pub async fn restore(&self, announced: &Announced, cid: u32) -> Result<Sample> {
        let spec = self.spec(cid, true);
        self.machines.prepare(&spec).await?;
        let mut expected = announced.expect(cid);
        let begun = Instant::now();
        let mut machine = self.machines.launch(&spec).await?;
        let launched = ms(begun);
        let Heard { at, channel, .. } = self.hello(announced, &mut expected, &mut machine, &spec.id).await?;
        let hello = at.duration_since(begun).as_secs_f64() * 1000.0;
        announced.configure(cid, channel).await?;
        let configured = ms(begun);
        guest::exec(cid, "first", &["/bin/true"]).await?;
        let mut sample = Sample { restore_exec_ms: Some(ms(begun)), ..Sample::default() };
        let faults = faults(self.pid(&spec.id)?)?;
        sample.counts.push(("pages_faulted_restore_to_exec", faults));
        sample.phases.push(("restore: launch", launched));
        if let Some(booted) = machine.booted() {
            sample.phases.extend(phases(&booted, false));
        }
        sample.phases.extend([("restore: hello", hello), ("restore: configured", configured)]);
        self.finish(&spec, cid, &mut sample, false).await?;
        Ok(sample)
    }

    async fn finish(&self, spec: &MachineSpec, cid: u32, sample: &mut Sample, cold: bool) -> Result<()> {
        if cold {
            for number in 0..self.setting.commands {
                let begun = Instant::now();
                guest::exec(cid, &format!("more-{number}"), &["/bin/true"]).await?;
                sample.exec_ms.push(ms(begun));
            }
            let held = memory::of(self.pid(&spec.id)?, self.setting.memory_mib)?;
            (sample.overhead_kib, sample.resident_kib) = (Some(held.own), Some(held.resident));
        }
        self.machines.release(&spec.id, Scope::Everything).await?;
        Ok(())
    }

    /// The monitor's process, found by the lock that it holds open.
    fn pid(&self, id: &SandboxId) -> Result<u32> {
        let instance = format!("bench-{}", std::process::id());
        let procs = format!("/sys/fs/cgroup/bivouac/{instance}/{id}/cgroup.procs");
        let pids = std::fs::read_to_string(&procs).with_context(|| procs.clone())?;
        pids.lines().next().and_then(|pid| pid.parse().ok()).context("no monitor in its cgroup")
    }
}

/// The monitor's own steps, by its clock. One that a start does not have is left out.
fn phases(booted: &bivouacd::machine::Booted, cold: bool) -> Vec<(&'static str, f64)> {
    let steps = [
        ("cold: monitor configured", "restore: monitor configured", booted.configured_us),
        ("cold: jailed", "restore: jailed", booted.jailed_us),
        ("cold: vm created", "restore: vm created", booted.vm_created_us),
        ("cold: cgroup joined", "restore: cgroup joined", booted.joined_us),
        ("cold: memory", "restore: state and memory", booted.memory_us),
        ("cold: devices", "restore: devices", booted.devices_us),
        ("cold: kernel loaded", "restore: kernel loaded", booted.loaded_us),
        ("cold: processors", "restore: processors", booted.processors_us),
        ("cold: guest runs", "restore: guest runs", booted.booted_us),
    ];
    let step = |(in_cold, in_restore, us): (&'static str, &'static str, u64)| {
        (us > 0).then(|| (if cold { in_cold } else { in_restore }, us as f64 / 1000.0))
    };
    steps.into_iter().filter_map(step).collect()
}

async fn exits(machine: &Machine) -> Result<u64> {
    match machine.ask(ToMonitor::Status, Vec::new()).await? {
        FromMonitor::Status { exits, .. } => Ok(exits),
        other => bail!("{other:?}"),
    }
}

/// KVM's own counters, of the one machine that lives. Empty where debugfs cannot be read.
fn kvm_statistics() -> Vec<(&'static str, f64)> {
    let folder = std::path::Path::new("/sys/kernel/debug/kvm");
    if !folder.is_dir() {
        let _ = std::process::Command::new("mount")
            .args(["-t", "debugfs", "none", "/sys/kernel/debug"])
            .stderr(std::process::Stdio::null())
            .status();
    }
    let read = |(file, name): (&str, &'static str)| {
        let count = std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()?;
        Some((name, count))
    };
    [
        ("exits", "kvm_exits_to_hello"),
        ("pf_taken", "kvm_page_faults_to_hello"),
        ("halt_exits", "kvm_halts_to_hello"),
        ("irq_injections", "kvm_interrupts_to_hello"),
        ("irq_exits", "kvm_host_interrupts_to_hello"),
        ("mmio_exits", "kvm_mmio_to_hello"),
        ("io_exits", "kvm_port_io_to_hello"),
        ("insn_emulation", "kvm_emulated_to_hello"),
    ]
    .into_iter()
    .filter_map(read)
    .collect()
}

/// Page faults of a process so far, those its guest made it take among them.
fn faults(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = stat.rsplit_once(')').context("stat")?.1;
    let field = |number: usize| rest.split_whitespace().nth(number).and_then(|n| n.parse::<f64>().ok());
    Ok(field(7).context("minor faults")? + field(9).context("major faults")?)
}
