//! Where an attack happens: a machine of its own, and a bystander.

use bivouac_protocol::monitor::{FromMonitor, ToMonitor};
use bivouac_tests::{Client, host, shared};
use bivouacd::{
    ids::SandboxId,
    lifecycle::{Reason, Scope},
    machine::{
        Machine, MachineSpec, Machines, SavedMachine, log_path,
        real::{RealMachines, Settings},
    },
};
use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};
use tokio::runtime::Runtime;

/// Memory of a machine under attack, in MiB: the least there is, which the guest counts on.
const MEMORY_MIB: u32 = 64;
/// What monitor and guest may have used together at their most. The guest touches less than 12 MiB.
const MEMORY_PEAK: u64 = 32 << 20;
/// What a monitor may have logged.
const LOG: u64 = 64 << 10;
/// How long an attack may take. A machine that is there after that hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long the bystander may take to answer while it shares its processor with an attack.
const ANSWER: Duration = Duration::from_secs(30);

pub struct Ground {
    runtime: Runtime,
    machines: RealMachines,
    data: PathBuf,
    instance: String,
    client: Client,
    bystander: String,
    _folder: tempfile::TempDir,
}

/// How many times as long as usual.
pub fn times() -> u64 {
    std::env::var("BIVOUAC_HOSTILE_TIMES").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}

impl Ground {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let instance = format!("hostile-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let client = shared().client();
        let bystander = client.create("base");
        let folder = tempfile::Builder::new().prefix("hostile-").tempdir_in("/var/lib/bivouac").unwrap();
        let data = folder.path().join("data");
        let settings = Settings {
            data_dir: data.clone(),
            prefix: prefix(folder.path()),
            instance: instance.clone(),
            console: false,
        };
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let machines = runtime.block_on(async { RealMachines::new(settings) }).unwrap();
        Self { runtime, machines, data, instance, client, bystander, _folder: folder }
    }

    /// Lets a guest attack, and says how its machine ended.
    pub fn attack(&self, name: &str, seed: u64, count: Option<u64>) -> Reason {
        self.attacks(name, [seed], count).remove(0)
    }

    /// Lets several guests attack at once, one for each seed, and says how their machines ended. Whatever that was: the bystander
    /// answered meanwhile, and of the machines nothing is left.
    pub fn attacks(
        &self,
        name: &str,
        seeds: impl IntoIterator<Item = u64>,
        count: Option<u64>,
    ) -> Vec<Reason> {
        let (begun, seeds) = (Instant::now(), Vec::from_iter(seeds));
        let specs: Vec<_> = seeds.iter().map(|seed| self.spec(name, *seed, count)).collect();
        let reasons = self.beside_the_bystander(name, || {
            self.runtime.block_on(async {
                let mut machines = Vec::new();
                for spec in &specs {
                    machines.push(self.launch(spec).await);
                }
                let mut reasons = Vec::new();
                for (seed, mut machine) in seeds.iter().zip(machines) {
                    let left = PATIENCE.saturating_sub(begun.elapsed());
                    let end = tokio::time::timeout(left, machine.ended()).await;
                    reasons.push(end.unwrap_or_else(|_| panic!("{name}, seed {seed} hangs")).reason());
                }
                reasons
            })
        });
        let took = begun.elapsed().as_secs_f64();
        for ((seed, spec), reason) in seeds.iter().zip(&specs).zip(&reasons) {
            let what = format!("{name}, seed {seed}");
            eprintln!("{what}: {took:.1} s, {}: {}", reason.code, reason.detail);
            let trouble =
                ["jail_violation", "monitor_exited", "monitor_killed", "monitor_lost", "host_memory_limit"];
            let log = self.log(&spec.id);
            assert!(!trouble.contains(&reason.code.as_ref()), "{what}: {reason:?}\n{log}");
            self.must_be_bounded(&what, &spec.id, MEMORY_PEAK);
        }
        for (seed, spec) in seeds.iter().zip(&specs) {
            self.must_leave_nothing(&format!("{name}, seed {seed}"), &spec.id);
        }
        reasons
    }

    /// Lets a guest attack that never stops, and deals with its monitor meanwhile: asks how it is, saves the machine, and takes up
    /// a clone, which goes on attacking.
    pub fn endless_attack(&self, name: &str, seed: u64, length: Duration) {
        let what = format!("{name}, seed {seed}");
        let spec = self.spec(name, seed, None);
        let saved = SavedMachine { folder: self.data.join("saved"), verify: true, record: false };
        let clone = MachineSpec { saved: Some(saved.clone()), ..self.spec(name, seed, None) };
        self.beside_the_bystander(&what, || {
            self.runtime.block_on(async {
                let machine = self.launch(&spec).await;
                must_answer(&what, &machine, length).await;
                self.machines.save(&spec.id, &machine, &saved.folder).await.unwrap();
                let cloned = self.launch(&clone).await;
                must_answer(&what, &cloned, length).await;
                must_answer(&what, &machine, Duration::ZERO).await;
            });
        });
        for spec in [&spec, &clone] {
            // All of its memory was read, and written to a file, whose pages count as well.
            self.must_be_bounded(&what, &spec.id, MEMORY_PEAK + (u64::from(MEMORY_MIB) << 20));
            self.must_leave_nothing(&what, &spec.id);
        }
    }

    fn spec(&self, name: &str, seed: u64, count: Option<u64>) -> MachineSpec {
        // Away from those that daemons give.
        static CID: AtomicU32 = AtomicU32::new(3_000_000);
        let count = count.map(|count| format!(" count={count}")).unwrap_or_default();
        MachineSpec {
            id: SandboxId::new(),
            vcpus: 1,
            memory_mib: MEMORY_MIB,
            disk_mib: self.machines.disk_sizes()[0],
            cid: CID.fetch_add(1, Ordering::Relaxed),
            root: host::prefix().join("templates/base/rootfs.erofs"),
            saved: None,
            cmdline: format!("attack={name} seed={seed}{count}"),
        }
    }

    async fn launch(&self, spec: &MachineSpec) -> Machine {
        self.machines.prepare(spec).await.unwrap();
        self.machines.launch(spec).await.unwrap()
    }

    /// The bystander answers at least once while `work` goes on, and each time in time.
    fn beside_the_bystander<T>(&self, what: &str, work: impl FnOnce() -> T) -> T {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let bystander = scope.spawn(|| {
                loop {
                    let begun = Instant::now();
                    assert_eq!(self.client.output(&self.bystander, "echo unharmed"), "unharmed\n", "{what}");
                    let took = begun.elapsed();
                    assert!(took < ANSWER, "{what}: the bystander took {took:?} to answer");
                    if over.load(Ordering::Acquire) {
                        return;
                    }
                    thread::sleep(Duration::from_millis(100));
                }
            });
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            over.store(true, Ordering::Release);
            bystander.join().expect("the bystander answers");
            done.unwrap_or_else(|why| std::panic::resume_unwind(why))
        })
    }

    fn cgroup(&self) -> PathBuf {
        Path::new("/sys/fs/cgroup/bivouac").join(&self.instance)
    }

    fn log(&self, id: &SandboxId) -> String {
        fs::read_to_string(log_path(&self.data, id.as_str())).unwrap_or_default()
    }

    fn must_be_bounded(&self, what: &str, id: &SandboxId, most: u64) {
        let log = fs::metadata(log_path(&self.data, id.as_str())).map_or(0, |log| log.len());
        assert!(log < LOG, "{what}: {log} bytes were logged");
        let text = self.log(id);
        assert!(!text.contains("panicked"), "{what}: {text}");
        // Kernels before 5.19 do not keep it.
        let peak =
            fs::read_to_string(self.cgroup().join(id.as_str()).join("memory.peak")).unwrap_or_default();
        let peak = peak.trim().parse().unwrap_or(0);
        assert!(peak < most, "{what}: {peak} bytes of memory were used");
        eprintln!("{what}: {} KiB of memory at most, {log} bytes logged", peak >> 10);
    }

    fn must_leave_nothing(&self, what: &str, id: &SandboxId) {
        let left = self.runtime.block_on(async {
            self.machines.release(id, Scope::Everything).await.unwrap();
            self.machines.survey().await.unwrap()
        });
        assert!(!left.contains(id), "{what}: the host still knows of it");
        assert!(!self.data.join("sandboxes").join(id.as_str()).exists(), "{what}: files are left");
        assert!(!self.cgroup().join(id.as_str()).exists(), "{what}: the cgroup is left");
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        // Empty, as was checked after each attack.
        let _ = fs::remove_dir(self.cgroup());
        if !thread::panicking() {
            self.client.remove(&self.bystander);
        }
    }
}

/// A monitor whose guest keeps it busy says so, again and again; and the guest is not standing still.
async fn must_answer(what: &str, machine: &Machine, length: Duration) {
    let begun = Instant::now();
    let mut seen = Vec::new();
    // One that was just started has not come far.
    while begun.elapsed() < length || (seen.first() == seen.last() && begun.elapsed() < length + ANSWER) {
        let answer = tokio::time::timeout(ANSWER, machine.ask(ToMonitor::Status, Vec::new())).await;
        match answer.expect("the monitor answers") {
            Ok(FromMonitor::Status { exits, .. }) => seen.push(exits),
            other => panic!("{what}: {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(seen.first() < seen.last(), "{what}: the guest does nothing: {seen:?}");
}

/// What a daemon would be installed as, with another guest kernel.
fn prefix(folder: &Path) -> PathBuf {
    let kernel = std::env::var_os("BIVOUAC_HOSTILE_GUEST")
        .expect("BIVOUAC_HOSTILE_GUEST is not set: run these tests by `cargo xtask test`");
    let (prefix, product) = (folder.join("prefix"), host::prefix());
    fs::create_dir_all(prefix.join("kernel")).unwrap();
    symlink(kernel, prefix.join("kernel/vmlinux")).unwrap();
    for folder in ["bin", "scratch"] {
        symlink(product.join(folder), prefix.join(folder)).unwrap();
    }
    prefix
}
