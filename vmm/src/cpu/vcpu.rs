//! One virtual processor and the loop that runs it on a thread of its own.

use super::{cpuid, msrs, registers};
use crate::{Error, bus::Bus};
use kvm_bindings::{CpuId, KVM_SYSTEM_EVENT_CRASH};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
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

pub struct Vcpu {
    id: u8,
    fd: VcpuFd,
    ports: Arc<Bus>,
    registers: Arc<Bus>,
    exits: Arc<AtomicU64>,
}

impl Vcpu {
    /// The features KVM supports, read once for all processors of a machine.
    pub fn supported_features(kvm: &Kvm) -> Result<CpuId, Error> {
        cpuid::supported(kvm)
    }

    /// Makes processor `id` of `count`. The interrupt controller has to exist before. `exits` counts how often a
    /// processor of the machine comes out of the guest and into this process.
    pub fn new(
        vm: &VmFd,
        id: u8,
        count: u8,
        features: &CpuId,
        ports: Arc<Bus>,
        registers: Arc<Bus>,
        exits: Arc<AtomicU64>,
    ) -> Result<Self, Error> {
        let failed = |why: kvm_ioctls::Error| Error::Vcpu { vcpu: id, why: why.to_string() };
        let fd = vm.create_vcpu(u64::from(id)).map_err(failed)?;
        // Features first: which model-specific registers KVM takes depends on them.
        fd.set_cpuid2(&cpuid::for_vcpu(features, id, count)?).map_err(failed)?;
        msrs::set_for_boot(&fd, id)?;
        Ok(Self { id, fd, ports, registers, exits })
    }

    /// Points the boot processor at the kernel.
    pub fn set_entry(&self, entry: GuestAddress) -> Result<(), Error> {
        registers::set_for_boot(&self.fd, entry)
            .map_err(|e| Error::Vcpu { vcpu: self.id, why: e.to_string() })
    }

    /// Runs until the machine ends, and says why this processor did.
    pub fn run(mut self) -> Exit {
        loop {
            if let Some(exit) = self.step() {
                return exit;
            }
        }
    }

    fn step(&mut self) -> Option<Exit> {
        let id = self.id;
        let exit = self.fd.run();
        self.exits.fetch_add(1, Ordering::Relaxed);
        let outcome = match exit {
            Ok(VcpuExit::MmioRead(address, data)) => self.registers.read(address, data),
            Ok(VcpuExit::MmioWrite(address, data)) => self.registers.write(address, data),
            Ok(VcpuExit::IoIn(port, data)) => self.ports.read(u64::from(port), data),
            Ok(VcpuExit::IoOut(port, data)) => self.ports.write(u64::from(port), data),
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
