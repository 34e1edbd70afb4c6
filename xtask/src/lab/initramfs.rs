//! The lab's first filesystem: busybox, the overlay module, and `init.sh`, as a cpio archive made for each start.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// What `init.sh` calls by name.
const APPLETS: &[&str] = &[
    "chroot",
    "echo",
    "hostname",
    "insmod",
    "ip",
    "ln",
    "mkdir",
    "mount",
    "poweroff",
    "sh",
    "sleep",
    "switch_root",
    "uname",
];

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const PLAIN: u32 = 0o100_644;
const LINK: u32 = 0o120_777;

/// What `init.sh` is told about this start.
#[derive(Debug)]
pub struct Settings<'a> {
    /// This program, by a path inside one of the shared folders.
    pub helper: &'a Path,
    pub modules: &'a Path,
    pub shared: &'a [&'a Path],
}

pub fn build(settings: &Settings<'_>) -> Result<Vec<u8>> {
    let busybox = fs::read("/bin/busybox").context("cannot read /bin/busybox (package busybox-static)")?;
    let overlay = settings.modules.join("kernel/fs/overlayfs/overlay.ko");
    let overlay = fs::read(&overlay).with_context(|| format!("cannot read {}", overlay.display()))?;
    let mut archive = Archive::default();
    archive.add("bin", FOLDER, b"");
    archive.add("bin/busybox", PROGRAM, &busybox);
    for applet in APPLETS {
        archive.add(&format!("bin/{applet}"), LINK, b"busybox");
    }
    archive.add("overlay.ko", PLAIN, &overlay);
    archive.add("lab.conf", PLAIN, conf(settings).as_bytes());
    archive.add("init", PROGRAM, include_bytes!("init.sh"));
    Ok(archive.finish())
}

/// Shell assignments, quoted so that any path comes out as it went in.
fn conf(settings: &Settings<'_>) -> String {
    let quote = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let shared: Vec<String> = settings.shared.iter().map(|path| path.display().to_string()).collect();
    format!(
        "HELPER={}\nMODULES={}\nSHARED={}\n",
        quote(&settings.helper.display().to_string()),
        quote(&settings.modules.display().to_string()),
        quote(&shared.join("\n"))
    )
}

/// A cpio archive in the `newc` format (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, data: &[u8]) {
        self.inode += 1;
        let mut head = String::from("070701");
        let links = 1;
        let fields =
            [self.inode, mode, 0, 0, links, 0, data.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        for field in fields {
            let _ = write!(head, "{field:08x}");
        }
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(data);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, b"");
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_a_quote_stays_one_word() {
        let settings = Settings {
            helper: Path::new("/it's/here"),
            modules: Path::new("/m"),
            shared: &[Path::new("/a b"), Path::new("/c")],
        };
        assert_eq!(conf(&settings), "HELPER='/it'\\''s/here'\nMODULES='/m'\nSHARED='/a b\n/c'\n");
    }

    #[test]
    fn every_entry_starts_on_a_multiple_of_four() {
        let mut archive = Archive::default();
        archive.add("a", PLAIN, b"12345");
        assert_eq!(archive.bytes.len() % 4, 0);
        let first = archive.bytes.len();
        let bytes = archive.finish();
        assert!(bytes.get(first..).unwrap().starts_with(b"070701"));
        assert_eq!(bytes.len() % 4, 0);
    }
}
