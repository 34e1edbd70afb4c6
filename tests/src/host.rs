//! Starting, killing and restarting a daemon.

use crate::client::Client;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// Where binaries, kernel and templates are: set by `cargo xtask test`.
pub fn prefix() -> PathBuf {
    std::env::var_os("BIVOUAC_PREFIX")
        .map(PathBuf::from)
        .expect("BIVOUAC_PREFIX is not set: run these tests by `cargo xtask test`")
}

/// A daemon and its data.
pub struct Host {
    child: Child,
    pub data: PathBuf,
    pub url: String,
    _folder: tempfile::TempDir,
}

/// The daemon that most tests share. It ends with the test program.
pub fn shared() -> &'static Host {
    static SHARED: OnceLock<Host> = OnceLock::new();
    SHARED.get_or_init(Host::start)
}

impl Host {
    pub fn start() -> Self {
        Self::start_in(Path::new("/var/lib/bivouac"))
    }

    /// A daemon whose data, and log, are in a folder of their own in `parent`.
    pub fn start_in(parent: &Path) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        fs::create_dir_all(parent).expect("the tests run as root");
        let name = format!("test-{}-{}-", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::Builder::new().prefix(&name).tempdir_in(parent).unwrap();
        let data = folder.path().to_owned();
        let (child, url) = spawn(&data);
        Self { child, data, url, _folder: folder }
    }

    /// A client with the administrator's key.
    pub fn client(&self) -> Client {
        Client::new(&self.url, &self.admin_key())
    }

    pub fn admin_key(&self) -> String {
        fs::read_to_string(self.data.join("admin.key")).unwrap().trim().to_owned()
    }

    /// As a crash does it: no handler runs.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts a daemon on the same data. Its address is new.
    pub fn restart(&mut self) {
        (self.child, self.url) = spawn(&self.data);
    }

    /// The command-line client, pointed at this daemon.
    pub fn cli(&self) -> Command {
        let mut command = Command::new(prefix().join("bin/bivouac"));
        command
            .env("BIVOUAC_SERVER", &self.url)
            .env("BIVOUAC_KEY_FILE", self.data.join("admin.key"))
            .stdin(Stdio::null());
        command
    }

    /// Process ids of a sandbox's monitor: those that have its folder's lock open.
    pub fn monitors(&self, sandbox: &str) -> Vec<i32> {
        let lock = self.data.join("sandboxes").join(sandbox).join("lock");
        processes_with(&lock)
    }

    /// Folders of the host's cgroup tree that carry this sandbox's id.
    pub fn cgroups(&self, sandbox: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut open = vec![PathBuf::from("/sys/fs/cgroup")];
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(&folder).into_iter().flatten().flatten().filter(|e| e.path().is_dir()) {
                if entry.file_name().to_string_lossy() == sandbox {
                    found.push(entry.path());
                }
                open.push(entry.path());
            }
        }
        found
    }

    /// Waits for something that the API does not announce. Patience is long: a loaded machine is slow, and a test that
    /// fails here has waited for something that does not come.
    pub fn eventually(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(Instant::now() < deadline, "not within 60 s: {what}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What the daemon logged about a sandbox.
    pub fn log_of(&self, sandbox: &str) -> String {
        let log = fs::read_to_string(self.data.with_extension("log")).unwrap_or_default();
        log.lines().filter(|line| line.contains(sandbox)).collect::<Vec<_>>().join("\n")
    }

    /// The last of what the daemon logged.
    pub fn log(&self) -> String {
        let log = fs::read_to_string(self.data.with_extension("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

fn spawn(data: &Path) -> (Child, String) {
    let log = fs::File::options().append(true).create(true).open(data.with_extension("log")).unwrap();
    let mut child = Command::new(prefix().join("bin/bivouacd"))
        .arg("--data-dir")
        .arg(data)
        .args(["--listen", "127.0.0.1:0", "--prefix"])
        .arg(prefix())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .expect("bivouacd starts");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for line in lines.by_ref() {
        let line = line.unwrap();
        if let Some(at) = line.find("ready on ") {
            let url = line[at + "ready on ".len()..].trim().to_owned();
            // Whatever it prints later must not block it.
            std::thread::spawn(move || lines.for_each(drop));
            return (child, url);
        }
    }
    let status = child.wait();
    let log = fs::read_to_string(data.with_extension("log")).unwrap_or_default();
    panic!("bivouacd ended ({status:?}) before it was ready:\n{log}");
}

fn processes_with(path: &Path) -> Vec<i32> {
    let Ok(path) = path.canonicalize() else { return Vec::new() };
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(pid) = process.file_name().to_string_lossy().parse::<i32>() else { continue };
        let open = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        if open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|target| target == path) {
            found.push(pid);
        }
    }
    found
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the daemon's log ---\n{}", self.log());
        }
        let client = self.client();
        for sandbox in client.sandboxes() {
            let _ = client.delete(&format!("/v1/sandboxes/{sandbox}?wait=1"));
        }
        self.kill();
        let _ = fs::remove_file(self.data.with_extension("log"));
    }
}
