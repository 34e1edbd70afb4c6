//! Puts virtio devices on the register bus, one after the other, each with an interrupt and a kick for each queue.
//!
//! The order of the slots is part of what a snapshot means, and the same for a machine that boots and one that is taken
//! up.

use super::Subscriber;
use crate::{
    Error,
    bus::Bus,
    devices::virtio::{
        self, Device, Interrupt,
        block::{Block, BlockWorker, Disk},
        entropy::{Entropy, EntropyWorker},
        net::{self, Net, NetWorker, Tap},
        runner,
        transport::{QUEUE_NOTIFY, Transport},
        vsock::{self, Vsock},
    },
    ending::Ending,
    layout,
    memory::Memory,
    snapshot::DeviceState,
};
use bivouac_protocol::monitor::Network;
use event_manager::{EventManager, SubscriberOps};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use std::{fs::File, sync::Arc};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub struct Slots<'a> {
    vm: &'a VmFd,
    memory: &'a Memory,
    ending: Ending,
    /// The devices as they were saved, for a machine that is taken up.
    saved: Option<&'a [DeviceState]>,
    pub registers: Bus,
    /// What the device thread serves.
    pub events: EventManager<Subscriber>,
    pub transports: Vec<(u32, Arc<Transport>)>,
}

impl<'a> Slots<'a> {
    pub fn new(
        vm: &'a VmFd,
        memory: &'a Memory,
        ending: Ending,
        saved: Option<&'a [DeviceState]>,
    ) -> Result<Self, Error> {
        let events =
            EventManager::new().map_err(|e| Error::Device { device: "event loop", why: e.to_string() })?;
        Ok(Self { vm, memory, ending, saved, registers: Bus::default(), events, transports: Vec::new() })
    }

    pub fn used(&self) -> u32 {
        self.transports.len() as u32
    }

    fn base(&self) -> u64 {
        layout::VIRTIO_MMIO_BASE + u64::from(self.used()) * layout::VIRTIO_MMIO_SIZE
    }

    /// An eventfd for each of the first `notified` of `queues` queues, which KVM writes when the driver notifies that
    /// queue. A device with one queue need not be told which, and KVM need not decode what was written.
    fn kicks(&self, queues: usize, notified: usize) -> Result<Vec<EventFd>, Error> {
        let address = IoEventAddress::Mmio(self.base() + QUEUE_NOTIFY);
        let connect = |kick: &EventFd, queue: u32| match queues {
            1 => self.vm.register_ioevent(kick, &address, NoDatamatch),
            _ => self.vm.register_ioevent(kick, &address, queue),
        };
        (0..notified as u32)
            .map(|queue| {
                let kick = EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?;
                connect(&kick, queue).map_err(Error::kvm("connect a device's queue"))?;
                Ok(kick)
            })
            .collect()
    }

    fn line(&self) -> Result<EventFd, Error> {
        let line = EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?;
        self.vm
            .register_irqfd(&line, layout::VIRTIO_IRQ_BASE + self.used())
            .map_err(Error::kvm("connect a device's interrupt"))?;
        Ok(line)
    }

    fn add(&mut self, device: Box<dyn Device>, interrupt: Interrupt) -> Result<(), Error> {
        let (id, interrupt, memory) = (device.id(), Arc::new(interrupt), self.memory.clone());
        let transport = match self.saved {
            None => Transport::new(device, interrupt, memory)?,
            Some(saved) => {
                let state = saved.get(self.transports.len()).filter(|state| state.id == id);
                let state = state.ok_or_else(|| {
                    Error::Snapshot(format!(
                        "slot {} does not hold the {} device",
                        self.used(),
                        device.name()
                    ))
                })?;
                Transport::restore(device, interrupt, memory, &state.transport)?
            }
        };
        let transport = Arc::new(transport);
        self.registers.insert(self.base(), layout::VIRTIO_MMIO_SIZE, transport.clone());
        self.transports.push((id, transport));
        Ok(())
    }

    fn worker<W: runner::Worker + 'static>(
        &mut self,
        worker: W,
        queues: usize,
    ) -> Result<runner::Handle, Error> {
        let (handle, runner) = runner::pair(worker, self.kicks(queues, queues)?, self.ending.clone())?;
        self.events.add_subscriber(Box::new(runner));
        Ok(handle)
    }

    pub fn block(&mut self, file: File, read_only: bool, name: &'static str) -> Result<(), Error> {
        let bytes = file.metadata().map_err(Error::io("read a disk's size"))?.len();
        if bytes == 0 || !bytes.is_multiple_of(virtio::block::SECTOR) {
            return Err(Error::Config(format!(
                "the {name} disk has {bytes} bytes, not a whole number of sectors"
            )));
        }
        let handle = self.worker(BlockWorker::new(Disk { file, bytes, read_only, name }), 1)?;
        let interrupt = Interrupt::new(self.line()?);
        self.add(Box::new(Block::new(handle, bytes, read_only)), interrupt)
    }

    pub fn vsock(&mut self, device: File, cid: u32) -> Result<(), Error> {
        let device = Vsock::new(device, self.memory, cid, self.kicks(vsock::QUEUES, vsock::VHOST_QUEUES)?)?;
        let interrupt = Interrupt::raised_by_kernel(self.line()?);
        self.add(Box::new(device), interrupt)
    }

    pub fn entropy(&mut self) -> Result<(), Error> {
        let handle = self.worker(EntropyWorker, 1)?;
        let interrupt = Interrupt::new(self.line()?);
        self.add(Box::new(Entropy::new(handle)), interrupt)
    }

    pub fn net(&mut self, tap: File, network: &Network) -> Result<(), Error> {
        let tap = Tap::new(tap)?;
        let control = tap.try_clone()?;
        let worker = NetWorker::new(tap, network.mtu);
        let (handle, runner) = net::pair(worker, self.kicks(net::QUEUES, net::QUEUES)?, self.ending.clone())?;
        self.events.add_subscriber(Box::new(runner));
        let interrupt = Interrupt::new(self.line()?);
        self.add(Box::new(Net::new(handle, control, network)?), interrupt)
    }
}
