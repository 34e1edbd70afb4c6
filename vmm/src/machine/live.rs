//! A machine as the control thread holds it: pause, go on, write out.

use crate::{
    Error,
    cpu::{Pausing, Processor},
    devices::virtio::transport::Transport,
    memory::Memory,
    snapshot::{self, DeviceState, MachineState},
};
use kvm_bindings::{KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip};
use kvm_ioctls::VmFd;
use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// How far a machine is from running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Running,
    /// Made and not yet run; `clone`: from a saved one.
    Held {
        clone: bool,
    },
    Paused,
}

pub struct Live {
    vm: VmFd,
    memory: Memory,
    memory_mib: u32,
    processors: Vec<Processor>,
    /// Virtio device id and transport, by slot.
    transports: Vec<(u32, Arc<Transport>)>,
    exits: Arc<AtomicU64>,
    stage: Stage,
}

impl Live {
    pub(super) fn new(
        vm: VmFd,
        memory: Memory,
        memory_mib: u32,
        processors: Vec<Processor>,
        transports: Vec<(u32, Arc<Transport>)>,
        exits: Arc<AtomicU64>,
        clone: bool,
    ) -> Self {
        let stage = Stage::Held { clone };
        Self { vm, memory, memory_mib, processors, transports, exits, stage }
    }

    pub fn exits(&self) -> u64 {
        self.exits.load(Ordering::Relaxed)
    }

    pub fn is_paused(&self) -> bool {
        self.stage != Stage::Running
    }

    /// Processors first: after that no register is touched, and devices can be taken apart.
    pub fn pause(&mut self) -> Result<(), Error> {
        if self.is_paused() {
            return Ok(());
        }
        let pausing = self.processors.iter().map(Processor::pause).collect::<Result<Vec<_>, _>>()?;
        pausing.into_iter().try_for_each(Pausing::wait)?;
        self.transports.iter().try_for_each(|(_, transport)| transport.sleep())?;
        self.stage = Stage::Paused;
        Ok(())
    }

    /// Devices first: the guest finds them at work.
    pub fn resume(&mut self) -> Result<(), Error> {
        let clone = match self.stage {
            Stage::Running => return Ok(()),
            Stage::Held { clone } => clone,
            Stage::Paused => false,
        };
        self.transports.iter().try_for_each(|(_, transport)| transport.wake(clone))?;
        self.processors.iter().try_for_each(Processor::resume)?;
        self.stage = Stage::Running;
        Ok(())
    }

    /// Writes a paused machine to two empty files, and syncs them.
    pub fn snapshot(&self, state: &File, memory: &File) -> Result<(), Error> {
        if self.stage != Stage::Paused {
            return Err(Error::Snapshot("the machine is not paused".into()));
        }
        if state.metadata().map_err(Error::io("look at the state file"))?.len() != 0 {
            return Err(Error::Snapshot("the state file is not empty".into()));
        }
        let devices = self
            .transports
            .iter()
            .map(|(id, transport)| Ok(DeviceState { id: *id, transport: transport.save()? }))
            .collect::<Result<Vec<_>, Error>>()?;
        let machine = MachineState {
            vcpus: self.processors.iter().map(Processor::save).collect::<Result<_, _>>()?,
            irqchips: self.irqchips()?,
            pit: self.vm.get_pit2().map_err(Error::kvm("save the interval timer"))?,
            clock: self.vm.get_clock().map_err(Error::kvm("save the clock"))?,
            devices,
            memory: snapshot::write(&self.memory, self.memory_mib, memory)?,
        };
        let file = snapshot::encode(&machine)?;
        state.write_all_at(&file, 0).map_err(Error::io("write the state file"))?;
        state.sync_all().map_err(Error::io("sync the state file"))
    }

    fn irqchips(&self) -> Result<Vec<kvm_irqchip>, Error> {
        [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC]
            .into_iter()
            .map(|chip_id| {
                let mut chip = kvm_irqchip { chip_id, ..Default::default() };
                self.vm.get_irqchip(&mut chip).map_err(Error::kvm("save the interrupt controllers"))?;
                Ok(chip)
            })
            .collect()
    }
}
