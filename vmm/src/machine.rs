//! One machine: put together in the order below, then run until it ends.
//!
//! 1. the VM descriptor, outside the sandbox's cgroup (inside one, `KVM_CREATE_VM` can take tens of milliseconds);
//! 2. this process joins the cgroup: memory, processors and threads made from here on are the sandbox's;
//! 3. guest memory, interrupt controller, devices;
//! 4. kernel and tables into guest memory, virtual processors;
//! 5. the processors' threads. From here on the guest runs, and this thread serves devices and the control socket.

use crate::{
    Error, boot,
    bus::Bus,
    control::Control,
    cpu::{self, Vcpu},
    devices::{
        legacy::{Console, ResetController},
        virtio::{
            self, Device, Interrupt,
            block::{Block, BlockWorker, Disk},
            entropy::{Entropy, EntropyWorker},
            net::{self, Net, NetWorker, Tap},
            runner,
            transport::{QUEUE_NOTIFY, Transport},
            vsock::{self, Vsock},
        },
    },
    ending::{Ending, Endings, channel_of_endings},
    layout,
    memory::{self, Memory},
    reception::Reception,
};
use bivouac_protocol::monitor::{BootConfig, FromMonitor, Network, StopReason, VERSION};
use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{IoEventAddress, Kvm, VmFd};
use std::{
    cell::RefCell,
    fs::File,
    io::Write,
    rc::Rc,
    sync::{Arc, atomic::AtomicU64},
    thread,
    time::Instant,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The descriptors a machine is made from; see [`bivouac_protocol::monitor::fd`].
pub struct Parts {
    pub kernel: File,
    pub root: File,
    pub scratch: File,
    pub cgroup: Option<File>,
    pub tap: Option<File>,
}

type Subscriber = Box<dyn MutEventSubscriber>;

/// A machine that has been put together and has not run yet.
pub struct Machine {
    // The VM and its memory outlive the processors' threads.
    _vm: VmFd,
    _memory: Memory,
    vcpus: Vec<Vcpu>,
    events: EventManager<Subscriber>,
    ending: Ending,
    endings: Endings,
    reset: EventFd,
    exits: Arc<AtomicU64>,
    /// Microseconds from `started` to the VM descriptor.
    vm_created_us: u64,
}

impl Machine {
    pub fn build(config: &BootConfig, parts: Parts, started: Instant) -> Result<Self, Error> {
        check(config)?;
        let kvm = Kvm::new().map_err(Error::kvm("open /dev/kvm"))?;
        let vm = create_vm(&kvm)?;
        let vm_created_us = micros(started);
        join_cgroup(parts.cgroup)?;

        let memory = memory::allocate(config.memory_mib)?;
        memory::register(&vm, &memory)?;
        vm.set_tss_address(layout::KVM_TSS).map_err(Error::kvm("place the task state segment"))?;
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(Error::kvm("place the identity map"))?;
        vm.create_irq_chip().map_err(Error::kvm("create the interrupt controller"))?;
        vm.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() })
            .map_err(Error::kvm("create the interval timer"))?;

        let (ending, endings) = channel_of_endings()?;
        let mut slots = Slots::new(&vm, &memory, ending.clone())?;
        slots.block(parts.root, true, "root")?;
        slots.block(parts.scratch, false, "scratch")?;
        slots.vsock(config.cid)?;
        slots.entropy()?;
        if let Some(network) = &config.network {
            let tap = parts.tap.ok_or_else(|| Error::Config("a network card needs a tap".into()))?;
            slots.net(tap, network)?;
        }
        let Slots { registers, events, used, .. } = slots;

        let mut ports = Bus::default();
        let reset = EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?;
        let signal = reset.try_clone().map_err(Error::io("copy an eventfd"))?;
        let span = u64::from(layout::I8042_COMMAND - layout::I8042_DATA) + 1;
        ports.insert(layout::I8042_DATA.into(), span, Arc::new(ResetController::new(signal)));
        if config.console {
            let interrupt = EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?;
            vm.register_irqfd(&interrupt, layout::SERIAL_IRQ)
                .map_err(Error::kvm("connect the serial port"))?;
            ports.insert(layout::SERIAL_PORT.into(), 8, Arc::new(Console::new(interrupt)));
        }

        let line = boot::command_line(used, config.console, &config.cmdline)?;
        let entry = boot::load_kernel(&memory, &mut { parts.kernel })?;
        boot::write_params(&memory, &line)?;
        boot::write_mptable(&memory, config.vcpus)?;
        cpu::write_tables(&memory)?;

        let features = Vcpu::supported_features(&kvm)?;
        let (ports, registers) = (Arc::new(ports), Arc::new(registers));
        let exits = Arc::new(AtomicU64::new(0));
        let vcpus = (0..config.vcpus)
            .map(|id| {
                let (ports, registers, exits) = (ports.clone(), registers.clone(), exits.clone());
                Vcpu::new(&vm, id, config.vcpus, &features, ports, registers, exits)
            })
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(boot_processor) = vcpus.first() {
            boot_processor.set_entry(entry)?;
        }
        Ok(Self { _vm: vm, _memory: memory, vcpus, events, ending, endings, reset, exits, vm_created_us })
    }

    /// Runs the guest until it ends, and says why it did: to the daemon, if one is connected, and to the caller.
    pub fn run(mut self, mut control: Control, configured_us: u64, started: Instant) -> StopReason {
        control.send(&FromMonitor::Booted {
            configured_us,
            vm_created_us: self.vm_created_us,
            booted_us: micros(started),
        });
        for (number, vcpu) in self.vcpus.drain(..).enumerate() {
            let ending = self.ending.clone();
            let thread = thread::Builder::new().name(format!("vcpu{number}")).stack_size(VCPU_STACK);
            if let Err(why) = thread.spawn(move || ending.exit(vcpu.run())) {
                self.ending.fault(Error::Io { what: "start a processor's thread", why });
            }
        }
        let over = Rc::new(RefCell::new(None));
        self.events.add_subscriber(Box::new(Reception::new(
            control,
            self.endings,
            self.reset,
            self.exits,
            over.clone(),
        )));
        loop {
            if let Err(e) = self.events.run() {
                return StopReason::Fault { detail: format!("event loop: {e}") };
            }
            if let Some(reason) = over.take() {
                return reason;
            }
        }
    }
}

/// Stack of a processor's thread. It handles one exit at a time and calls nothing deep.
const VCPU_STACK: usize = 128 << 10;

fn check(config: &BootConfig) -> Result<(), Error> {
    let refuse = |why: String| Err(Error::Config(why));
    if config.version != VERSION {
        return refuse(format!("this monitor speaks version {VERSION}, the daemon {}", config.version));
    }
    if !(1..=32).contains(&config.vcpus) {
        return refuse(format!("vcpus is {}, 1 to 32 are possible", config.vcpus));
    }
    if !(64..=65536).contains(&config.memory_mib) {
        return refuse(format!("memory_mib is {}, 64 to 65536 are possible", config.memory_mib));
    }
    if config.cid < 3 || config.cid == u32::MAX {
        return refuse(format!("context id {} is reserved", config.cid));
    }
    Ok(())
}

/// On a loaded host `KVM_CREATE_VM` can be interrupted; that is no failure.
fn create_vm(kvm: &Kvm) -> Result<VmFd, Error> {
    loop {
        match kvm.create_vm() {
            Err(e) if e.errno() == libc::EINTR => {}
            other => return other.map_err(Error::kvm("create a virtual machine")),
        }
    }
}

fn join_cgroup(procs: Option<File>) -> Result<(), Error> {
    procs.map_or(Ok(()), |mut procs| procs.write_all(b"0").map_err(Error::io("join the sandbox's cgroup")))
}

pub fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Puts virtio devices on the register bus, one after the other, each with an interrupt and a kick for each queue.
struct Slots<'a> {
    vm: &'a VmFd,
    memory: &'a Memory,
    ending: Ending,
    registers: Bus,
    events: EventManager<Subscriber>,
    used: u32,
}

impl<'a> Slots<'a> {
    fn new(vm: &'a VmFd, memory: &'a Memory, ending: Ending) -> Result<Self, Error> {
        let events =
            EventManager::new().map_err(|e| Error::Device { device: "event loop", why: e.to_string() })?;
        Ok(Self { vm, memory, ending, registers: Bus::default(), events, used: 0 })
    }

    fn base(&self) -> u64 {
        layout::VIRTIO_MMIO_BASE + u64::from(self.used) * layout::VIRTIO_MMIO_SIZE
    }

    /// An eventfd for each queue, which KVM writes when the driver notifies that queue.
    fn kicks(&self, queues: usize) -> Result<Vec<EventFd>, Error> {
        (0..queues as u32)
            .map(|queue| {
                let kick = EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?;
                let address = IoEventAddress::Mmio(self.base() + QUEUE_NOTIFY);
                self.vm
                    .register_ioevent(&kick, &address, queue)
                    .map_err(Error::kvm("connect a device's queue"))?;
                Ok(kick)
            })
            .collect()
    }

    fn line(&self) -> Result<EventFd, Error> {
        let line = EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?;
        self.vm
            .register_irqfd(&line, layout::VIRTIO_IRQ_BASE + self.used)
            .map_err(Error::kvm("connect a device's interrupt"))?;
        Ok(line)
    }

    fn add(&mut self, device: Box<dyn Device>, interrupt: Interrupt) -> Result<(), Error> {
        let transport = Transport::new(device, Arc::new(interrupt), self.memory.clone())?;
        self.registers.insert(self.base(), layout::VIRTIO_MMIO_SIZE, Arc::new(transport));
        self.used += 1;
        Ok(())
    }

    fn worker<W: runner::Worker + 'static>(
        &mut self,
        worker: W,
        queues: usize,
    ) -> Result<runner::Handle, Error> {
        let (handle, runner) = runner::pair(worker, self.kicks(queues)?, self.ending.clone())?;
        self.events.add_subscriber(Box::new(runner));
        Ok(handle)
    }

    fn block(&mut self, file: File, read_only: bool, name: &'static str) -> Result<(), Error> {
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

    fn vsock(&mut self, cid: u32) -> Result<(), Error> {
        let device = Vsock::new(self.memory, cid, self.kicks(vsock::QUEUES)?)?;
        let interrupt = Interrupt::raised_by_kernel(self.line()?);
        self.add(Box::new(device), interrupt)
    }

    fn entropy(&mut self) -> Result<(), Error> {
        let handle = self.worker(EntropyWorker, 1)?;
        let interrupt = Interrupt::new(self.line()?);
        self.add(Box::new(Entropy::new(handle)), interrupt)
    }

    fn net(&mut self, tap: File, network: &Network) -> Result<(), Error> {
        let tap = Tap::new(tap)?;
        let control = tap.try_clone()?;
        let worker = NetWorker::new(tap, network.mtu);
        let (handle, runner) = net::pair(worker, self.kicks(net::QUEUES)?, self.ending.clone())?;
        self.events.add_subscriber(Box::new(runner));
        let interrupt = Interrupt::new(self.line()?);
        self.add(Box::new(Net::new(handle, control, network)?), interrupt)
    }
}
