//! Creation: reserve, act, record.
//!
//! The row is written under its uniqueness constraint before any process exists. Beside the write, the folder, the disk
//! and the cgroup are made already: they carry the sandbox's id, cost nothing to a tenant, and are released by name
//! should the row never come to be.

use super::boot::{Phases, micros};
use super::task::{Boot, Work, start};
use super::{Live, View};
use crate::daemon::Daemon;
use crate::error::{Code, Problem};
use crate::ids::SandboxId;
use crate::lifecycle::{Scope, State};
use crate::machine::{MachineSpec, real};
use crate::store::{NewSandbox, Reserved, SandboxRow};
use crate::templates::Template;
use std::sync::Arc;
use std::time::Instant;

/// A creation that was asked for, checked.
#[derive(Debug, Clone)]
pub struct CreateRequest {
    pub org: String,
    pub actor: String,
    pub request_id: Option<String>,
    pub fingerprint: String,
    pub name: Option<String>,
    /// JSON object of strings.
    pub metadata: String,
    /// JSON object of strings.
    pub env: String,
    pub template: Arc<Template>,
    pub vcpus: u32,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub ttl_ms: Option<i64>,
}

#[derive(Debug)]
pub struct Created {
    pub row: SandboxRow,
    /// The request id had made it before.
    pub replayed: bool,
}

/// Accepts a creation, or finds the one that the request id stands for. The machine is made by the sandbox's own task.
pub async fn create(daemon: &Arc<Daemon>, request: CreateRequest) -> Result<Created, Problem> {
    let accepted = Instant::now();
    let id = SandboxId::new();
    let admitted = daemon.admission.admit(&id, real::memory_cost_mib(request.memory_mib));
    if let Err(full) = admitted {
        // A retry of one that was admitted needs no room.
        return match known(daemon, &request).await? {
            Some(row) => Ok(Created { row, replayed: true }),
            None => Err(Problem::new(Code::HostCapacity, full.to_string())),
        };
    }
    let live = Arc::new(Live::new(id.clone()));
    daemon.keep(Arc::clone(&live));

    let prepared = {
        let (daemon, spec) = (Arc::clone(daemon), unaddressed(&id, &request));
        tokio::spawn(async move {
            let begun = Instant::now();
            let made = daemon.machines.prepare(&spec).await;
            (made, micros(begun))
        })
    };
    let reserving = Instant::now();
    let reserved = daemon.store.reserve_sandbox(&new_row(daemon, &id, &request)).await;
    match reserved {
        Ok(Reserved::New(row)) => {
            live.publish(&row);
            let phases = Phases { reserve_us: Some(micros(reserving)), ..Phases::default() };
            let boot = Boot { template: request.template, prepared: Some(prepared), accepted, phases };
            start(Arc::clone(daemon), live, Work::Boot(Box::new(boot)));
            if row.expires_at.is_some() {
                daemon.expiry.notify_one();
            }
            Ok(Created { row, replayed: false })
        }
        other => {
            let _ = prepared.await;
            if let Err(cause) = daemon.machines.release(&id, Scope::Everything).await {
                tracing::warn!(sandbox = %id, %cause, "what was prepared is left to the next start");
            }
            daemon.forget(&id);
            match other {
                Ok(Reserved::Existing(row) | Reserved::New(row)) => same(row, &request),
                Err(cause) => Err(Problem::from(cause)),
            }
        }
    }
}

/// What the request id made before, if it did.
async fn known(daemon: &Daemon, request: &CreateRequest) -> Result<Option<SandboxRow>, Problem> {
    let Some(request_id) = &request.request_id else { return Ok(None) };
    match daemon.store.sandbox_by_request(&request.org, request_id).await? {
        None => Ok(None),
        Some(row) => same(row, request).map(|created| Some(created.row)),
    }
}

fn same(row: SandboxRow, request: &CreateRequest) -> Result<Created, Problem> {
    if row.fingerprint == request.fingerprint {
        return Ok(Created { row, replayed: true });
    }
    let id = request.request_id.as_deref().unwrap_or_default();
    Err(Problem::new(Code::RequestIdReused, format!("request_id `{id}` made {} from another body", row.id)))
}

fn unaddressed(id: &SandboxId, request: &CreateRequest) -> MachineSpec {
    MachineSpec {
        id: id.clone(),
        vcpus: u8::try_from(request.vcpus).unwrap_or(1),
        memory_mib: request.memory_mib,
        disk_mib: request.disk_mib,
        cid: 0,
        root: request.template.image.clone(),
        saved: None,
        cmdline: String::new(),
    }
}

fn new_row(daemon: &Daemon, id: &SandboxId, request: &CreateRequest) -> NewSandbox {
    NewSandbox {
        id: id.to_string(),
        org: request.org.clone(),
        actor: request.actor.clone(),
        request_id: request.request_id.clone(),
        fingerprint: request.fingerprint.clone(),
        name: request.name.clone(),
        metadata: request.metadata.clone(),
        env: request.env.clone(),
        template: request.template.name.clone(),
        template_version: request.template.version.clone(),
        vcpus: request.vcpus,
        memory_mib: request.memory_mib,
        disk_mib: request.disk_mib,
        ttl_ms: request.ttl_ms,
        at: daemon.clock.now(),
    }
}

/// Waits for a creation to come out, whoever began it. A retry finds the sandbox as it is by now, even if that is
/// deleted: it made one, and the request id stands for that one and no other.
pub async fn creation_result(daemon: &Daemon, created: Created) -> Result<SandboxRow, Problem> {
    let Created { row, replayed } = created;
    let live = SandboxId::parse(&row.id).and_then(|id| daemon.live(&id));
    if let Some(live) = live {
        live.until(|view: &View| view.state != State::Creating).await;
    }
    let row = daemon.store.sandbox(&row.id).await?.unwrap_or(row);
    let mut problem = match State::parse(&row.state) {
        Some(State::Failed) => {
            let detail = row.failure_detail.as_deref().unwrap_or("the reason is not known");
            Problem::new(Code::SandboxFailed, format!("sandbox {} failed: {detail}", row.id))
        }
        Some(State::Deleting | State::Deleted) if !replayed => {
            Problem::new(Code::SandboxNotRunning, format!("sandbox {} was deleted", row.id))
        }
        _ => return Ok(row),
    };
    problem.sandbox_id = Some(row.id.clone());
    problem.reason = row.failure_code.clone();
    Err(problem)
}
