//! How a machine comes to be, in the order below.
//!
//! 1. the jail, for good;
//! 2. the VM descriptor, outside the sandbox's cgroup (inside one, `KVM_CREATE_VM` can take tens of milliseconds);
//! 3. this process joins the cgroup: memory, processors and threads made from here on are the sandbox's;
//! 4. guest memory: fresh, or a saved machine's;
//! 5. interrupt controllers and devices;
//! 6. the processors, pointed at the kernel or as they were saved;
//! 7. a thread for the devices and one for each processor, which wait for [`super::Live::resume`], each behind its
//!    filter. This one enters its own when it begins to serve ([`Machine::run`]).

use super::{
    Live, Machine, Subscriber, micros,
    parts::{Parts, Saved},
    slots::Slots,
};
use crate::{
    Error, boot,
    bus::Bus,
    cpu::{self, Processor, Surroundings, Vcpu},
    devices::legacy::{Console, ResetController},
    ending::{Ending, channel_of_endings},
    jail::{self, seccomp},
    layout,
    memory::{self, Memory},
    snapshot::{self, DeviceState, MachineState},
};
use bivouac_protocol::monitor::{BootConfig, Jail, Network, PageRun, RestoreConfig, Timing, VERSION};
use event_manager::EventManager;
use kvm_bindings::{CpuId, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Kvm, VmFd};
use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{FromRawFd, IntoRawFd, OwnedFd},
    sync::{Arc, atomic::AtomicU64},
    thread,
    time::Instant,
};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Where a machine comes from.
pub enum Origin {
    Boot { config: BootConfig, kernel: File },
    Restore { config: RestoreConfig, saved: Saved },
}

/// Stack of the device thread: its deepest call moves one request.
const DEVICES_STACK: usize = 128 << 10;

/// Makes the machine. From the jail on this process is confined, whatever comes of it.
pub fn start(
    origin: Origin,
    parts: Parts,
    network: Option<OwnedFd>,
    started: Instant,
) -> Result<Machine, Error> {
    let mut timing = Timing { configured_us: micros(started), ..Timing::default() };
    let jail = check(&origin)?;
    jail::enter(&jail, network, largest_file(&parts)?)?;
    timing.jailed_us = micros(started);

    // SAFETY: the descriptor is `/dev/kvm`, opened by the daemon and owned by nobody else.
    let kvm = unsafe { Kvm::from_raw_fd(parts.kvm.into_raw_fd()) };
    let vm = create_vm(&kvm)?;
    timing.vm_created_us = micros(started);
    join_cgroup(parts.cgroup)?;
    timing.joined_us = micros(started);

    let builder = Builder {
        kvm,
        vm,
        vsock: parts.vsock,
        root: parts.root,
        scratch: parts.scratch,
        tap: parts.tap,
        timing,
        started,
    };
    match origin {
        Origin::Boot { config, kernel } => builder.boot(&config, kernel),
        Origin::Restore { config, saved } => builder.restore(&config, saved),
    }
}

/// The disk, or a snapshot of the memory of the largest machine.
fn largest_file(parts: &Parts) -> Result<u64, Error> {
    let disk = parts.scratch.metadata().map_err(Error::io("read a disk's size"))?.len();
    Ok(disk.max(u64::from(memory::MAX_MIB) << 20))
}

fn check(origin: &Origin) -> Result<Jail, Error> {
    let refuse = |why: String| Err(Error::Config(why));
    let (version, jail, cid) = match origin {
        Origin::Boot { config, .. } => (config.version, config.jail, config.cid),
        Origin::Restore { config, .. } => (config.version, config.jail, config.cid),
    };
    if version != VERSION {
        return refuse(format!("this monitor speaks version {VERSION}, the daemon {version}"));
    }
    if cid < 3 || cid == u32::MAX {
        return refuse(format!("context id {cid} is reserved"));
    }
    let Origin::Boot { config, .. } = origin else { return Ok(jail) };
    if !(1..=32).contains(&config.vcpus) {
        return refuse(format!("vcpus is {}, 1 to 32 are possible", config.vcpus));
    }
    let (least, most) = (memory::MIN_MIB, memory::MAX_MIB);
    if !(least..=most).contains(&config.memory_mib) {
        return refuse(format!("memory_mib is {}, {least} to {most} are possible", config.memory_mib));
    }
    Ok(jail)
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

/// A VM descriptor and what its devices are made from.
struct Builder {
    kvm: Kvm,
    vm: VmFd,
    vsock: File,
    root: File,
    scratch: File,
    tap: Option<File>,
    timing: Timing,
    started: Instant,
}

/// What the devices are to be.
struct Wanted<'a> {
    cid: u32,
    console: bool,
    network: Option<Network>,
    /// As they were, for a machine that is taken up.
    saved: Option<&'a [DeviceState]>,
}

/// What stands around the processors.
struct Board {
    vm: VmFd,
    around: Surroundings,
    transports: Vec<(u32, Arc<crate::devices::virtio::transport::Transport>)>,
    events: EventManager<Subscriber>,
    reset: EventFd,
}

impl Builder {
    fn boot(mut self, config: &BootConfig, mut kernel: File) -> Result<Machine, Error> {
        let memory = memory::allocate(config.memory_mib)?;
        self.timing.memory_us = micros(self.started);
        let features = cpu::supported_features(&self.kvm)?;
        let (ending, endings) = channel_of_endings()?;
        let wanted =
            Wanted { cid: config.cid, console: config.console, network: config.network, saved: None };
        let (mut timing, started) = (self.timing, self.started);
        let board = self.board(&memory, &wanted, &ending)?;
        timing.devices_us = micros(started);

        let line = boot::command_line(board.transports.len() as u32, config.console, &config.cmdline)?;
        let entry = boot::load_kernel(&memory, &mut kernel)?;
        boot::write_params(&memory, &line)?;
        let used = interrupts(board.transports.len(), config.console);
        boot::write_mptable(&memory, config.vcpus, &used)?;
        cpu::write_tables(&memory)?;
        timing.loaded_us = micros(started);

        let vcpus = (0..config.vcpus)
            .map(|id| Vcpu::new(&board.vm, id, config.vcpus, &features, board.around.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(boot_processor) = vcpus.first() {
            boot_processor.set_entry(entry)?;
        }
        timing.processors_us = micros(started);
        let reset = board.reset.try_clone().map_err(Error::io("copy an eventfd"))?;
        let live = board.start(vcpus, memory, config.memory_mib, &ending, false)?;
        Ok(Machine { live, ending, endings, reset, timing })
    }

    fn restore(mut self, config: &RestoreConfig, saved: Saved) -> Result<Machine, Error> {
        let state = read_state(saved.state)?;
        check_state(&state, &cpu::supported_features(&self.kvm)?)?;
        let memory = snapshot::map(&state.memory, saved.memory, config.verify)?;
        if config.record {
            snapshot::read_singly(&memory)?;
        }
        self.timing.memory_us = micros(self.started);
        let (ending, endings) = channel_of_endings()?;
        let saved = Some(state.devices.as_slice());
        let wanted = Wanted { cid: config.cid, console: false, network: config.network, saved };
        let (mut timing, started) = (self.timing, self.started);
        let board = self.board(&memory, &wanted, &ending)?;
        timing.devices_us = micros(started);
        if board.transports.len() != state.devices.len() {
            return Err(Error::Snapshot("it has devices that this machine has no slot for".into()));
        }

        let vcpus = state
            .vcpus
            .iter()
            .zip(0..)
            .map(|(vcpu, id)| Vcpu::restored(&board.vm, id, vcpu, board.around.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        // The controllers' pins and the timer's channels as they were; then the clock, which runs from here on.
        for chip in &state.irqchips {
            board.vm.set_irqchip(chip).map_err(Error::kvm("restore the interrupt controllers"))?;
        }
        board.vm.set_pit2(&state.pit).map_err(Error::kvm("restore the interval timer"))?;
        // Only the time is given back: the flags tell what the saving host could vouch for.
        let clock = kvm_bindings::kvm_clock_data { clock: state.clock.clock, ..Default::default() };
        board.vm.set_clock(&clock).map_err(Error::kvm("restore the clock"))?;
        timing.processors_us = micros(started);
        prefetch(&memory, state.memory.mib, &config.prefetch, vcpus.first());

        let reset = board.reset.try_clone().map_err(Error::io("copy an eventfd"))?;
        let live = board.start(vcpus, memory, state.memory.mib, &ending, true)?;
        Ok(Machine { live, ending, endings, reset, timing })
    }

    fn board(self, memory: &Memory, wanted: &Wanted<'_>, ending: &Ending) -> Result<Board, Error> {
        let vm = self.vm;
        memory::register(&vm, memory)?;
        vm.set_tss_address(layout::KVM_TSS).map_err(Error::kvm("place the task state segment"))?;
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(Error::kvm("place the identity map"))?;
        vm.create_irq_chip().map_err(Error::kvm("create the interrupt controller"))?;
        vm.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() })
            .map_err(Error::kvm("create the interval timer"))?;

        let mut slots = Slots::new(&vm, memory, ending.clone(), wanted.saved)?;
        slots.block(self.root, true, "root")?;
        slots.block(self.scratch, false, "scratch")?;
        slots.vsock(self.vsock, wanted.cid)?;
        slots.entropy()?;
        if let Some(network) = &wanted.network {
            let tap = self.tap.ok_or_else(|| Error::Config("a network card needs a tap".into()))?;
            slots.net(tap, network)?;
        }
        let Slots { registers, events, transports, .. } = slots;

        let reset = EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?;
        let ports = ports(&vm, wanted.console, &reset)?;
        let around = Surroundings {
            ports: Arc::new(ports),
            registers: Arc::new(registers),
            exits: Arc::new(AtomicU64::new(0)),
            msrs: cpu::saved_msrs(&self.kvm)?.into(),
        };
        Ok(Board { vm, around, transports, events, reset })
    }
}

/// The interrupt lines that something is connected to: the timer's, which the kernel looks for, the serial port's and one
/// for each device.
fn interrupts(devices: usize, console: bool) -> Vec<u8> {
    let serial = console.then_some(layout::SERIAL_IRQ);
    let devices = (layout::VIRTIO_IRQ_BASE..).take(devices);
    std::iter::once(0).chain(serial).chain(devices).filter_map(|irq| u8::try_from(irq).ok()).collect()
}

fn ports(vm: &VmFd, console: bool, reset: &EventFd) -> Result<Bus, Error> {
    let mut ports = Bus::default();
    let signal = reset.try_clone().map_err(Error::io("copy an eventfd"))?;
    let span = u64::from(layout::I8042_COMMAND - layout::I8042_DATA) + 1;
    ports.insert(layout::I8042_DATA.into(), span, Arc::new(ResetController::new(signal)));
    if console {
        let interrupt = EventFd::new(EFD_NONBLOCK).map_err(Error::io("make an eventfd"))?;
        vm.register_irqfd(&interrupt, layout::SERIAL_IRQ).map_err(Error::kvm("connect the serial port"))?;
        ports.insert(layout::SERIAL_PORT.into(), 8, Arc::new(Console::new(interrupt)));
    }
    Ok(ports)
}

/// Maps what the guest is about to touch: into this process, and from there into the guest.
fn prefetch(memory: &Memory, mib: u32, runs: &[PageRun], processor: Option<&Vcpu>) {
    for run in runs {
        for (start, bytes) in snapshot::guest_ranges(mib, run) {
            snapshot::populate(memory, start, bytes, run.written);
            if let Some(processor) = processor {
                processor.prefault(start, bytes);
            }
        }
    }
}

fn read_state(file: File) -> Result<MachineState, Error> {
    let mut bytes = Vec::new();
    // One byte above the cap, so that a longer file is seen to be one.
    file.take(snapshot::CAP as u64 + 1).read_to_end(&mut bytes).map_err(Error::io("read the state file"))?;
    if bytes.len() > snapshot::CAP {
        return Err(Error::Snapshot(format!("the state file has more than {} bytes", snapshot::CAP)));
    }
    snapshot::decode(&bytes)
}

fn check_state(state: &MachineState, host: &CpuId) -> Result<(), Error> {
    if !(1..=32).contains(&state.vcpus.len()) {
        return Err(Error::Snapshot(format!(
            "it has {} processors, 1 to 32 are possible",
            state.vcpus.len()
        )));
    }
    state.vcpus.iter().try_for_each(|vcpu| snapshot::check_processor(&vcpu.cpuid, host.as_slice()))
}

impl Board {
    /// Starts the threads; the processors wait to be resumed.
    fn start(
        self,
        vcpus: Vec<Vcpu>,
        memory: Memory,
        memory_mib: u32,
        ending: &Ending,
        clone: bool,
    ) -> Result<Live, Error> {
        let Self { vm, around, transports, events, .. } = self;
        start_devices(events, ending.clone())?;
        let processors = vcpus
            .into_iter()
            .map(|vcpu| Processor::start(vcpu, ending.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Live::new(vm, memory, memory_mib, processors, transports, around.exits, clone))
    }
}

fn start_devices(mut events: EventManager<Subscriber>, ending: Ending) -> Result<(), Error> {
    let serve = move || {
        if let Err(error) = seccomp::enter(seccomp::Thread::Devices) {
            ending.fault(error);
            return;
        }
        loop {
            if let Err(e) = events.run() {
                ending.fault(Error::Device { device: "event loop", why: e.to_string() });
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("devices".into()).stack_size(DEVICES_STACK);
    thread.spawn(serve).map(drop).map_err(Error::io("start the device thread"))
}
