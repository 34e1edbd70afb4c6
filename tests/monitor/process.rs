//! A process as `/proc` shows it to root.

use std::{collections::BTreeMap, fs, path::PathBuf};

/// `PF_USER_WORKER` of `include/linux/sched.h`: a thread of the kernel's in this process (vhost's, KVM's), which never
/// runs a program and so makes no system calls.
const PF_USER_WORKER: u64 = 0x4000;

#[derive(Debug, Clone)]
pub struct Thread {
    pub tid: i32,
    pub name: String,
    /// It works for the kernel.
    pub kernel: bool,
}

impl Thread {
    /// Which of the monitor's kinds it is.
    pub fn kind(&self) -> &str {
        match self.name.as_str() {
            "devices" => "devices",
            name if name.starts_with("vcpu") => "vcpu",
            _ if self.kernel => "kernel",
            _ => "control",
        }
    }
}

pub fn path(pid: i32, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{file}"))
}

pub fn read(pid: i32, file: &str) -> String {
    fs::read_to_string(path(pid, file)).unwrap_or_else(|e| panic!("/proc/{pid}/{file}: {e}"))
}

pub fn threads(pid: i32) -> Vec<Thread> {
    let mut threads: Vec<Thread> = fs::read_dir(path(pid, "task"))
        .unwrap()
        .map(|entry| {
            let tid = entry.unwrap().file_name().to_str().unwrap().parse().unwrap();
            let name = read(pid, &format!("task/{tid}/comm")).trim().to_owned();
            let flags: u64 = stat(pid, tid)[6].parse().unwrap();
            Thread { tid, name, kernel: flags & PF_USER_WORKER != 0 }
        })
        .collect();
    threads.sort_by_key(|thread| thread.tid);
    threads
}

pub fn thread(pid: i32, kind: &str) -> Thread {
    let all = threads(pid);
    all.iter().find(|thread| thread.kind() == kind).unwrap_or_else(|| panic!("no {kind} in {all:?}")).clone()
}

/// The fields of a thread's `stat` after its name: the first is its state.
fn stat(pid: i32, tid: i32) -> Vec<String> {
    let stat = read(pid, &format!("task/{tid}/stat"));
    let (_, rest) = stat.rsplit_once(") ").unwrap();
    rest.split_whitespace().map(str::to_owned).collect()
}

/// Clock ticks of processor time that a thread has taken.
pub fn ticks(pid: i32, tid: i32) -> u64 {
    let stat = stat(pid, tid);
    stat[11].parse::<u64>().unwrap() + stat[12].parse::<u64>().unwrap()
}

pub fn status(pid: i32, tid: i32) -> BTreeMap<String, String> {
    read(pid, &format!("task/{tid}/status"))
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_owned(), value.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect()
}

pub fn namespace(pid: &str, kind: &str) -> String {
    fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap().to_str().unwrap().to_owned()
}

/// What it has open: number and target.
pub fn descriptors(pid: i32) -> BTreeMap<i32, String> {
    fs::read_dir(path(pid, "fd"))
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let target = fs::read_link(entry.path()).unwrap().to_string_lossy().into_owned();
            (entry.file_name().to_str().unwrap().parse().unwrap(), target)
        })
        .collect()
}

/// A writable mapping: addresses, and how much of it is in memory, in KiB.
#[derive(Debug, Clone, Copy)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    pub resident_kib: u64,
}

impl Mapping {
    pub fn len(self) -> u64 {
        self.end - self.start
    }
}

/// Its private writable mappings, largest first: guest memory leads.
pub fn mappings(pid: i32) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    let mut wanted = false;
    for line in read(pid, "smaps").lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        if let Some((start, end)) = first.split_once('-') {
            wanted = second == "rw-p";
            if wanted {
                let address = |text| u64::from_str_radix(text, 16).unwrap();
                found.push(Mapping { start: address(start), end: address(end), resident_kib: 0 });
            }
        } else if wanted && first == "Rss:" {
            found.last_mut().unwrap().resident_kib = second.parse().unwrap();
        }
    }
    found.sort_by_key(|mapping| std::cmp::Reverse(mapping.len()));
    found
}

/// What is in a mapping.
pub fn contents(pid: i32, mapping: Mapping) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; usize::try_from(mapping.len()).unwrap()];
    fs::File::open(path(pid, "mem")).unwrap().read_exact_at(&mut bytes, mapping.start).unwrap();
    bytes
}
