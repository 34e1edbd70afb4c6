//! Configuration space (the guest's context id) and the hand-over to vhost.

use super::{DEVICE_ID, QUEUE_SIZE, QUEUES, VHOST_QUEUES};
use crate::{
    Error,
    devices::virtio::{Activation, Device, feature::RING},
    memory::Memory,
};
use std::sync::Arc;
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData, vhost_kern::vsock::Vsock as Kernel,
    vsock::VhostVsock,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};
use vmm_sys_util::eventfd::EventFd;

pub struct Vsock {
    kernel: Kernel<Arc<Memory>>,
    config: [u8; 8],
    features: u64,
    kicks: Vec<EventFd>,
    /// The event queue while live: nothing is sent on it before a restore.
    event: Option<Queue>,
}

impl Vsock {
    /// Opens vhost-vsock and claims the context id, so that one in use is found before the guest starts.
    pub fn new(memory: &Memory, cid: u32, kicks: Vec<EventFd>) -> Result<Self, Error> {
        let kernel = Kernel::new(Arc::new(memory.clone())).map_err(|e| {
            failed(format!("cannot open /dev/vhost-vsock: {e}; is the module vhost_vsock loaded?"))
        })?;
        kernel.set_owner().map_err(|e| failed(format!("set owner: {e}")))?;
        let offered = kernel.get_features().map_err(|e| failed(format!("read features: {e}")))?;
        kernel.set_guest_cid(u64::from(cid)).map_err(|e| failed(format!("context id {cid}: {e}")))?;
        Ok(Self {
            kernel,
            config: u64::from(cid).to_le_bytes(),
            features: offered & RING,
            kicks,
            event: None,
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
    Error::Device { device: "vsock", why }
}

impl Device for Vsock {
    fn name(&self) -> &'static str {
        "vsock"
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

    fn activate(&mut self, mut activation: Activation) -> Result<(), Error> {
        self.hand_over(&activation).map_err(|e| failed(e.to_string()))?;
        self.event = activation.queues.pop();
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Error> {
        self.event = None;
        self.kernel.stop().map_err(|e| failed(format!("stop: {e}")))
    }
}
