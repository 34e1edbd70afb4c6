//! Configuration space (the guest's context id) and the hand-over to vhost.

use super::{DEVICE, DEVICE_ID, QUEUE_SIZE, QUEUES, VHOST_QUEUES, event, kernel::Kernel};
use crate::{
    Error,
    devices::virtio::{Activation, Device, feature::RING},
    memory::Memory,
};
use std::fs::File;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData, vsock::VhostVsock};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};
use vmm_sys_util::eventfd::EventFd;

pub struct Vsock {
    kernel: Kernel,
    config: [u8; 8],
    features: u64,
    kicks: Vec<EventFd>,
    /// What the kernel and the driver work on, while the device is active.
    active: Option<Activation>,
}

impl Vsock {
    /// Claims the context id, so that one in use is found before the guest starts.
    pub fn new(device: File, memory: &Memory, cid: u32, kicks: Vec<EventFd>) -> Result<Self, Error> {
        let kernel = Kernel::new(device, memory);
        kernel.set_owner().map_err(|e| failed(format!("set owner: {e}")))?;
        let offered = kernel.get_features().map_err(|e| failed(format!("read features: {e}")))?;
        kernel.set_guest_cid(u64::from(cid)).map_err(|e| failed(format!("context id {cid}: {e}")))?;
        Ok(Self {
            kernel,
            config: u64::from(cid).to_le_bytes(),
            features: offered & RING,
            kicks,
            active: None,
        })
    }

    fn hand_over(&self, activation: &Activation) -> Result<(), vhost::Error> {
        self.kernel.set_features(activation.features)?;
        let regions: Vec<_> = activation.memory.iter().filter_map(region).collect();
        self.kernel.set_mem_table(&regions)?;
        for (index, queue) in activation.queues.iter().enumerate().take(VHOST_QUEUES) {
            self.kernel.set_vring_num(index, queue.size())?;
            self.kernel.set_vring_addr(
                index,
                &VringConfigData {
                    queue_max_size: QUEUE_SIZE,
                    queue_size: queue.size(),
                    flags: 0,
                    desc_table_addr: queue.desc_table(),
                    used_ring_addr: queue.used_ring(),
                    avail_ring_addr: queue.avail_ring(),
                    log_addr: None,
                },
            )?;
            self.kernel.set_vring_base(index, queue.next_avail())?;
            self.kernel.set_vring_call(index, activation.interrupt.line())?;
            if let Some(kick) = self.kicks.get(index) {
                self.kernel.set_vring_kick(index, kick)?;
            }
        }
        self.kernel.start()
    }
}

fn region(region: &vm_memory::GuestRegionMmap<()>) -> Option<VhostUserMemoryRegionInfo> {
    Some(VhostUserMemoryRegionInfo {
        guest_phys_addr: region.start_addr().0,
        memory_size: region.len(),
        userspace_addr: region.get_host_address(MemoryRegionAddress(0)).ok()? as u64,
        mmap_offset: 0,
        mmap_handle: -1,
    })
}

fn failed(why: String) -> Error {
    Error::Device { device: DEVICE, why }
}

impl Device for Vsock {
    fn name(&self) -> &'static str {
        DEVICE
    }

    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; QUEUES]
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        self.hand_over(&activation).map_err(|e| failed(e.to_string()))?;
        // Whatever was sent before the kernel looked: with event indexes the driver may not notify again.
        for kick in self.kicks.iter().take(VHOST_QUEUES) {
            kick.write(1).map_err(Error::io("notify vhost"))?;
        }
        self.active = Some(activation);
        Ok(())
    }

    fn sleep(&mut self) -> Result<Vec<Queue>, Error> {
        let Some(Activation { mut queues, .. }) = self.active.take() else { return Ok(Vec::new()) };
        self.kernel.stop().map_err(|e| failed(format!("stop: {e}")))?;
        // The kernel's position in a ring is its own until it is asked; the used index is in guest memory.
        for (index, queue) in queues.iter_mut().enumerate().take(VHOST_QUEUES) {
            let position =
                self.kernel.get_vring_base(index).map_err(|e| failed(format!("stop queue {index}: {e}")))?;
            let position = u16::try_from(position)
                .map_err(|_| failed(format!("queue {index} stands at {position}, which is no index")))?;
            queue.set_next_avail(position);
        }
        Ok(queues)
    }

    fn cloned(&mut self) -> Result<(), Error> {
        let Some(Activation { queues, memory, .. }) = &mut self.active else { return Ok(()) };
        match queues.last_mut() {
            Some(queue) => event::reset_transport(queue, memory).map(drop),
            None => Ok(()),
        }
    }
}
