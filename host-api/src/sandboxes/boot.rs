//! From a prepared machine to a sandbox that is usable, and how long each part took.

use super::Live;
use crate::agent::{self, AgentError};
use crate::daemon::Daemon;
use crate::ids::SandboxId;
use crate::lifecycle::Reason;
use crate::limits;
use crate::machine::{Machine, MachineEnd, MachineSpec};
use crate::store::SandboxRow;
use crate::templates::Template;
use bivouac_protocol::agent::{Configure, Hello, PORT_PARAMETER};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use utoipa::ToSchema;

/// How often another CID is tried before the host is taken to have none.
const CID_ATTEMPTS: u32 = 8;

/// How long each part of a creation took, in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Phases {
    /// Making the row durable. Runs beside `prepare_us`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserve_us: Option<u64>,
    /// Folder, disk and cgroup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prepare_us: Option<u64>,
    /// Starting the monitor's process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_us: Option<u64>,
    /// From the monitor's start to the agent's first word on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub announce_us: Option<u64>,
    /// Entropy, clock, name and environment given and confirmed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub configure_us: Option<u64>,
    /// From the accepted create to usable; recording that is not in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_us: Option<u64>,
    /// By the monitor's clock, from the start of its program to the guest's processors starting to run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor_booted_us: Option<u64>,
    /// By the guest's clock, from kernel entry to the agent's first word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_uptime_us: Option<u64>,
}

pub(super) fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// What came of it.
pub(super) enum Outcome {
    Usable {
        machine: Machine,
        hello: Hello,
    },
    Failed(Reason),
    /// A delete was accepted meanwhile.
    Deleted,
}

pub(super) fn spec(daemon: &Daemon, row: &SandboxRow, template: &Template) -> Option<MachineSpec> {
    Some(MachineSpec {
        id: SandboxId::parse(&row.id)?,
        vcpus: u8::try_from(row.vcpus).ok()?,
        memory_mib: u32::try_from(row.memory_mib).ok()?,
        disk_mib: u32::try_from(row.disk_mib).ok()?,
        cid: u32::try_from(row.cid?).ok()?,
        root: template.image.clone(),
        saved: None,
        cmdline: format!("{PORT_PARAMETER}={}", daemon.port),
    })
}

/// Starts the machine and waits for its agent. Ends early if the machine does, or if a delete comes.
pub(super) async fn boot(
    daemon: &Daemon,
    live: &Live,
    row: &SandboxRow,
    template: &Template,
    phases: &mut Phases,
) -> Outcome {
    let Some(mut spec) = spec(daemon, row, template) else {
        return Outcome::Failed(Reason::new("internal", "the sandbox's row does not describe a machine"));
    };
    for _ in 0..CID_ATTEMPTS {
        match boot_once(daemon, live, row, template, &spec, phases).await {
            Err(MachineEnd::CidTaken) => match daemon.store.change_cid(&row.id).await {
                Ok(Some(cid)) => spec.cid = u32::try_from(cid).unwrap_or(spec.cid),
                Ok(None) => return Outcome::Deleted,
                Err(cause) => return Outcome::Failed(Reason::new("internal", cause.to_string())),
            },
            Err(end) => return Outcome::Failed(end.reason()),
            Ok(outcome) => return outcome,
        }
    }
    Outcome::Failed(MachineEnd::CidTaken.reason())
}

async fn boot_once(
    daemon: &Daemon,
    live: &Live,
    row: &SandboxRow,
    template: &Template,
    spec: &MachineSpec,
    phases: &mut Phases,
) -> Result<Outcome, MachineEnd> {
    let mut expected = daemon.announcements.expect(spec.cid);
    let launched = Instant::now();
    let mut machine = match daemon.machines.launch(spec).await {
        Ok(machine) => machine,
        Err(cause) => return Ok(Outcome::Failed(Reason::new("boot_failed", cause.to_string()))),
    };
    phases.launch_us = Some(micros(launched));
    let announced = async {
        let mut channel = expected
            .arrival()
            .await
            .ok_or_else(|| AgentError::Protocol("nobody waits for the announcement any more".to_owned()))?;
        phases.announce_us = Some(micros(launched));
        let configuring = Instant::now();
        let hello = agent::configure(&mut channel, || configuration(row, template, &spec.id)).await;
        daemon.announcements.keep(spec.cid, channel);
        phases.configure_us = Some(micros(configuring));
        hello
    };
    let answered = tokio::select! {
        answered = tokio::time::timeout(limits::BOOT, announced) => answered,
        end = machine.ended() => return Err(end),
        () = live.deleted() => return Ok(Outcome::Deleted),
    };
    phases.monitor_booted_us = machine.booted().map(|booted| booted.booted_us);
    Ok(match answered {
        Ok(Ok(hello)) => {
            phases.guest_uptime_us = Some(hello.uptime_us);
            Outcome::Usable { machine, hello }
        }
        Ok(Err(cause)) => Outcome::Failed(Reason::new("agent_failed", cause.to_string())),
        Err(_) => Outcome::Failed(Reason::new(
            "boot_timeout",
            format!("the guest did not announce itself within {} s", limits::BOOT.as_secs()),
        )),
    })
}

fn configuration(row: &SandboxRow, template: &Template, id: &SandboxId) -> Configure {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let mut env: BTreeMap<String, String> = template.env.clone();
    let own: BTreeMap<String, String> = serde_json::from_str(&row.env).unwrap_or_default();
    env.extend(own);
    Configure {
        hostname: id.hostname(),
        entropy: crate::auth::entropy(),
        unix_time_ns: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
        env: env.into_iter().collect(),
        user: template.user.clone(),
        workdir: template.workdir.clone(),
    }
}
