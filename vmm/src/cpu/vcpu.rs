//! One virtual processor: made, entered, and its exits served.

use super::{
    cpuid, msrs, prefault, registers,
    state::{self, VcpuState},
};
use crate::{Error, bus::Bus};
use kvm_bindings::{CpuId, KVM_SYSTEM_EVENT_CRASH};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use vm_memory::GuestAddress;

/// Why a processor will not run again.
#[derive(Debug)]
pub enum Exit {
    /// The guest reset or powered off the machine.
    Shutdown,
    /// The processor is in a state that the guest cannot leave.
    Crash(String),
    /// A device, or KVM, refused to go on.
    Fault(Error),
}

/// What every processor of a machine shares.
#[derive(Clone)]
pub struct Surroundings {
    pub ports: Arc<Bus>,
    pub registers: Arc<Bus>,
    /// How often a processor came out of the guest and into this process.
    pub exits: Arc<AtomicU64>,
    /// Registers that are saved, in the order to restore them in.
    pub msrs: Arc<[u32]>,
}

pub struct Vcpu {
    id: u8,
    fd: VcpuFd,
    around: Surroundings,
}

impl Vcpu {
    /// Makes processor `id` of `count` as it is before the first instruction. The interrupt controller has to exist
    /// before.
    pub fn new(vm: &VmFd, id: u8, count: u8, features: &CpuId, around: Surroundings) -> Result<Self, Error> {
        let failed = |why: kvm_ioctls::Error| Error::Vcpu { vcpu: id, why: why.to_string() };
        let fd = vm.create_vcpu(u64::from(id)).map_err(failed)?;
        // Features first: which model-specific registers KVM takes depends on them.
        fd.set_cpuid2(&cpuid::for_vcpu(features, id, count)?).map_err(failed)?;
        msrs::set_for_boot(&fd, id)?;
        Ok(Self { id, fd, around })
    }

    /// Makes processor `id` as it was saved.
    pub fn restored(vm: &VmFd, id: u8, state: &VcpuState, around: Surroundings) -> Result<Self, Error> {
        let failed = |why: kvm_ioctls::Error| Error::Vcpu { vcpu: id, why: why.to_string() };
        let fd = vm.create_vcpu(u64::from(id)).map_err(failed)?;
        state::restore(&fd, id, state)?;
        // Tells the guest's kvm-clock that time was lost, so that its watchdogs do not take it for a stall. A guest
        // without kvm-clock has nothing to be told.
        let _ = fd.kvmclock_ctrl();
        Ok(Self { id, fd, around })
    }

    /// Maps guest pages that are about to be touched, as far as this host can.
    pub fn prefault(&self, start: u64, bytes: u64) {
        prefault::map(&self.fd, start, bytes);
    }

    pub fn id(&self) -> u8 {
        self.id
    }

    /// Points the boot processor at the kernel.
    pub fn set_entry(&self, entry: GuestAddress) -> Result<(), Error> {
        registers::set_for_boot(&self.fd, entry)
            .map_err(|e| Error::Vcpu { vcpu: self.id, why: e.to_string() })
    }

    /// The byte in the page shared with KVM which, when set, lets `KVM_RUN` return at once.
    pub(super) fn immediate_exit(&mut self) -> *mut u8 {
        &raw mut self.fd.get_kvm_run().immediate_exit
    }

    pub(super) fn set_immediate_exit(&mut self, on: bool) {
        self.fd.set_kvm_immediate_exit(on.into());
    }

    /// Brings the processor to a state that can be saved: KVM finishes the exit that was served last only when it is
    /// entered again, and with the immediate exit set it then returns before the guest runs.
    pub(super) fn settle(&mut self) -> Result<(), Error> {
        self.set_immediate_exit(true);
        let outcome = self.fd.run();
        let settled = match outcome {
            Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => Ok(()),
            Ok(exit) => Err(format!("unexpected exit {exit:?} with nothing to run")),
            Err(e) => Err(format!("KVM_RUN: {e}")),
        };
        self.set_immediate_exit(false);
        settled.map_err(|why| Error::Vcpu { vcpu: self.id, why })
    }

    pub(super) fn save(&self) -> Result<VcpuState, Error> {
        state::save(&self.fd, &self.around.msrs)
            .map_err(|e| Error::Vcpu { vcpu: self.id, why: format!("save: {e}") })
    }

    /// Runs the guest until it needs this process, and serves that.
    pub(super) fn step(&mut self) -> Option<Exit> {
        let id = self.id;
        let exit = self.fd.run();
        self.around.exits.fetch_add(1, Ordering::Relaxed);
        let outcome = match exit {
            Ok(VcpuExit::MmioRead(address, data)) => self.around.registers.read(address, data),
            Ok(VcpuExit::MmioWrite(address, data)) => self.around.registers.write(address, data),
            Ok(VcpuExit::IoIn(port, data)) => self.around.ports.read(u64::from(port), data),
            Ok(VcpuExit::IoOut(port, data)) => self.around.ports.write(u64::from(port), data),
            // HLT stays in the kernel as long as the interrupt controller does.
            Ok(VcpuExit::Hlt | VcpuExit::Intr) => Ok(()),
            Ok(VcpuExit::Shutdown) => {
                return Some(Exit::Crash(format!(
                    "triple fault on processor {id}: the guest kernel lost control"
                )));
            }
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, _)) => {
                return Some(Exit::Crash("the guest kernel reported a crash".into()));
            }
            Ok(VcpuExit::SystemEvent(..)) => return Some(Exit::Shutdown),
            Ok(VcpuExit::FailEntry(reason, cpu)) => Err(Error::Vcpu {
                vcpu: id,
                why: format!(
                    "the host's processor {cpu} refused to enter the guest, hardware reason {reason:#x}"
                ),
            }),
            Ok(VcpuExit::InternalError) => Err(Error::Vcpu {
                vcpu: id,
                why: "KVM could not emulate what the guest did (KVM_EXIT_INTERNAL_ERROR)".into(),
            }),
            Ok(other) => Err(Error::Vcpu { vcpu: id, why: format!("unexpected exit {other:?}") }),
            Err(e) if e.errno() == libc::EINTR || e.errno() == libc::EAGAIN => Ok(()),
            Err(e) => Err(Error::Vcpu { vcpu: id, why: format!("KVM_RUN: {e}") }),
        };
        outcome.err().map(Exit::Fault)
    }
}
