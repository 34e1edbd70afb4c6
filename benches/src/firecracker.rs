//! Firecracker, by the binary given: cold, from a configuration file, serial port off.
//!
//! Its socket device is a Unix socket on the host: the guest's connections to a port arrive at `<path>_<port>`, and the
//! host's go to `<path>` after a line that names the port.

use crate::{
    Setting, guest, memory, ms,
    qemu::{Running, copy, said},
    sample::Sample,
};
use anyhow::{Context, Result, ensure};
use bivouac_protocol::agent::{AGENT_PORT, Hello, PORT_PARAMETER, Reply};
use bivouac_vmm::boot;
use bivouacd::agent::wire;
use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

/// Any port: the socket's name carries it.
const PORT: u32 = 5000;
const PATIENCE: Duration = Duration::from_secs(60);

pub async fn cold(setting: &Setting, program: &Path, cid: u32) -> Result<Sample> {
    let folder = tempfile::Builder::new().prefix("fc-").tempdir_in(&setting.folder)?;
    let (disk, socket) = (folder.path().join("disk.img"), folder.path().join("v.sock"));
    copy(&setting.disk, &disk)?;
    let config = folder.path().join("config.json");
    std::fs::write(&config, configuration(setting, &disk, &socket, cid)?.to_string())?;
    let listener = UnixListener::bind(folder.path().join(format!("v.sock_{PORT}")))?;

    let begun = Instant::now();
    let child = Command::new(program)
        .args(["--no-api", "--config-file"])
        .arg(&config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start firecracker")?;
    let mut running = Running(child);
    let accepted = tokio::time::timeout(PATIENCE, listener.accept()).await;
    let (mut channel, _) = accepted.with_context(|| said(&mut running))??;
    let _: Hello = wire::receive(&mut channel).await?;
    let hello = ms(begun);
    wire::send(&mut channel, &guest::configuration(cid)?).await?;
    let configured: Reply = wire::receive(&mut channel).await?;
    ensure!(configured == Reply::Configured, "not configured: {configured:?}");
    exec(&socket, "first").await?;
    let mut sample =
        Sample { cold_hello_ms: Some(hello), cold_exec_ms: Some(ms(begun)), ..Sample::default() };
    for number in 0..setting.commands {
        let begun = Instant::now();
        exec(&socket, &format!("more-{number}")).await?;
        sample.exec_ms.push(ms(begun));
    }
    let held = memory::of(running.0.id(), setting.memory_mib)?;
    (sample.overhead_kib, sample.resident_kib) = (Some(held.own), Some(held.resident));
    Ok(sample)
}

async fn exec(socket: &Path, id: &str) -> Result<()> {
    let mut channel = UnixStream::connect(socket).await?;
    channel.write_all(format!("CONNECT {AGENT_PORT}\n").as_bytes()).await?;
    // "OK <port>\n"
    while channel.read_u8().await? != b'\n' {}
    guest::run(&mut channel, id, &["/bin/true"]).await.map(drop)
}

fn configuration(setting: &Setting, disk: &Path, socket: &Path, cid: u32) -> Result<serde_json::Value> {
    // Ours, and what Firecracker's own advice adds; it says itself where its devices are.
    let extra = format!("pci=off i8042.noaux i8042.nomux i8042.dumbkbd {PORT_PARAMETER}={PORT}");
    let arguments = boot::command_line(0, false, &extra)?;
    Ok(serde_json::json!({
        "boot-source": { "kernel_image_path": setting.kernel, "boot_args": arguments },
        "drives": [
            { "drive_id": "root", "path_on_host": setting.root, "is_root_device": true, "is_read_only": true },
            { "drive_id": "scratch", "path_on_host": disk, "is_root_device": false, "is_read_only": false },
        ],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": setting.memory_mib },
        "vsock": { "guest_cid": cid, "uds_path": socket },
        "entropy": {},
    }))
}
