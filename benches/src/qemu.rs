//! QEMU's microvm machine, as its documentation advises for a short start, with the same devices over MMIO.

use crate::{
    Setting, guest,
    guest::{Announced, Heard},
    memory, ms,
    sample::Sample,
};
use anyhow::{Context, Result};
use bivouac_protocol::agent::PORT_PARAMETER;
use bivouac_vmm::boot;
use std::{
    path::Path,
    process::{Child, Command, Stdio},
    time::Instant,
};

/// Kills the process when it goes, however that comes about.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub async fn cold(setting: &Setting, announced: &Announced, cid: u32) -> Result<Sample> {
    let disk = setting.folder.join(format!("qemu-{cid}.img"));
    copy(&setting.disk, &disk)?;
    let mut expected = announced.expect(cid);
    let mut command = command(setting, &disk, announced.port, cid)?;
    let begun = Instant::now();
    let mut running = Running(command.spawn().context("cannot start qemu-system-x86_64")?);
    let heard = announced.hello(&mut expected).await;
    let Heard { at, channel, .. } = heard.with_context(|| said(&mut running))?;
    let hello = at.duration_since(begun).as_secs_f64() * 1000.0;
    announced.configure(cid, channel).await?;
    guest::exec(cid, "first", &["/bin/true"]).await?;
    let mut sample =
        Sample { cold_hello_ms: Some(hello), cold_exec_ms: Some(ms(begun)), ..Sample::default() };
    for number in 0..setting.commands {
        let begun = Instant::now();
        guest::exec(cid, &format!("more-{number}"), &["/bin/true"]).await?;
        sample.exec_ms.push(ms(begun));
    }
    let held = memory::of(running.0.id(), setting.memory_mib)?;
    (sample.overhead_kib, sample.resident_kib) = (Some(held.own), Some(held.resident));
    drop(running);
    std::fs::remove_file(&disk)?;
    Ok(sample)
}

fn command(setting: &Setting, disk: &Path, port: u32, cid: u32) -> Result<Command> {
    let mut command = Command::new("qemu-system-x86_64");
    let drive = |id: &str, file: &Path, more: &str| {
        format!("if=none,id={id},format=raw,file={}{more}", file.display())
    };
    command
        .args([
            "-M",
            "microvm,acpi=off,x-option-roms=off,rtc=off,isa-serial=off,pit=on,pic=on",
            "-enable-kvm",
        ])
        .args(["-cpu", "host", "-smp", "1", "-m", &format!("{}M", setting.memory_mib)])
        .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
        .arg("-kernel")
        .arg(&setting.kernel)
        .arg("-append")
        // Ours; QEMU adds where its devices are.
        .arg(boot::command_line(0, false, &format!("{PORT_PARAMETER}={port}"))?)
        .args(["-device", "virtio-rng-device"])
        .args(["-device", &format!("vhost-vsock-device,guest-cid={cid}")])
        .args(["-drive", &drive("root", &setting.root, ",readonly=on")])
        .args(["-device", "virtio-blk-device,drive=root"])
        .args(["-drive", &drive("scratch", disk, "")])
        .args(["-device", "virtio-blk-device,drive=scratch"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    if std::env::var_os("BIVOUAC_BENCH_CONSOLE").is_some() {
        command.args(["-serial", "stdio"]);
    }
    Ok(command)
}

/// What a peer printed before it ended, for an error.
pub fn said(running: &mut Running) -> String {
    let _ = running.0.kill();
    let output =
        running.0.stderr.take().map(std::io::read_to_string).and_then(Result::ok).unwrap_or_default();
    format!("it printed: {}", output.trim())
}

/// A copy that keeps the holes.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let status = Command::new("cp").arg("--sparse=always").arg(from).arg(to).status()?;
    anyhow::ensure!(status.success(), "cannot copy {}", from.display());
    Ok(())
}
