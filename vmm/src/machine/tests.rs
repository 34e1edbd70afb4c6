//! Guests of a few bytes on real processors: they run on any KVM, one that is too slow or too incomplete for Linux included. Where
//! there is none, the tests say so and pass.

use super::Live;
use crate::{
    Error,
    bus::{Bus, Registers},
    cpu::{self, Exit, Processor, Surroundings, Vcpu},
    devices::legacy::ResetController,
    ending::{Endings, channel_of_endings},
    layout,
    memory::{self, Memory},
    snapshot,
};
use kvm_bindings::{kvm_clock_data, kvm_pit_config};
use kvm_ioctls::{Kvm, VmFd};
use std::{
    os::unix::fs::FileExt,
    sync::{Arc, Mutex, atomic::AtomicU64},
    time::{Duration, Instant},
};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const MIB: u32 = 64;
const CODE: u64 = layout::HIGH_MEMORY;
/// What the guests write to, and where nothing but a device is.
const COUNTER: u64 = 0x20_0000;
const DEVICE: u64 = 0x800_0000;
const PORT: u64 = 0x10;
/// Under emulation an instruction can take a microsecond, on a busy host a thread can wait for its turn for long.
const PATIENCE: Duration = Duration::from_secs(20);

/// inc rbx; mov [COUNTER], rbx; jmp: the memory follows the register, so that one that was lost shows in the other.
const COUNT: &[u8] = &[0x48, 0xff, 0xc3, 0x48, 0x89, 0x1c, 0x25, 0x00, 0x00, 0x20, 0x00, 0xeb, 0xf3];
/// hlt; jmp
const HALT: &[u8] = &[0xf4, 0xeb, 0xfd];
/// ud2, with no handler for it, nor for what comes of that
const CRASH: &[u8] = &[0x0f, 0x0b];

/// Writes down every access, and answers reads with the numbers 1, 2, 3, and so on.
#[derive(Default)]
struct Spy(Mutex<Vec<(u64, Vec<u8>)>>);

impl Registers for Spy {
    fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        self.0.lock().unwrap().push((offset, Vec::new()));
        data.iter_mut().zip(1..).for_each(|(byte, number)| *byte = number);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        if data == [0xee] {
            return Err(Error::Guest { device: "spy", why: "ee".into() });
        }
        self.0.lock().unwrap().push((offset, data.to_vec()));
        Ok(())
    }
}

/// A board with nothing on it but spies.
struct Board {
    kvm: Kvm,
    vm: VmFd,
    around: Surroundings,
    ports: Arc<Spy>,
    registers: Arc<Spy>,
    reset: EventFd,
}

/// None, and a word about it, where there is no KVM.
fn board(memory: &Memory) -> Option<Board> {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(e) => {
            eprintln!("skipped: /dev/kvm cannot be opened: {e}");
            return None;
        }
    };
    let vm = kvm.create_vm().unwrap();
    memory::register(&vm, memory).unwrap();
    vm.set_tss_address(layout::KVM_TSS).unwrap();
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP).unwrap();
    vm.create_irq_chip().unwrap();
    vm.create_pit2(kvm_pit_config::default()).unwrap();
    let (spied_ports, spied_registers) = (Arc::new(Spy::default()), Arc::new(Spy::default()));
    let reset = EventFd::new(EFD_NONBLOCK).unwrap();
    let (mut ports, mut registers) = (Bus::default(), Bus::default());
    ports.insert(PORT, 2, spied_ports.clone());
    ports.insert(0x60, 5, Arc::new(ResetController::new(reset.try_clone().unwrap())));
    registers.insert(DEVICE, 0x1000, spied_registers.clone());
    let around = Surroundings {
        ports: Arc::new(ports),
        registers: Arc::new(registers),
        exits: Arc::new(AtomicU64::new(0)),
        msrs: cpu::saved_msrs(&kvm).unwrap().into(),
    };
    Some(Board { kvm, vm, around, ports: spied_ports, registers: spied_registers, reset })
}

/// A machine that is held, and how it is heard to end.
struct Guest {
    live: Live,
    memory: Memory,
    endings: Endings,
    ports: Arc<Spy>,
    registers: Arc<Spy>,
    reset: EventFd,
}

fn guest(code: &[u8]) -> Option<Guest> {
    let memory = memory::allocate(MIB).unwrap();
    memory.write_slice(code, GuestAddress(CODE)).unwrap();
    cpu::write_tables(&memory).unwrap();
    let board = board(&memory)?;
    let features = cpu::supported_features(&board.kvm).unwrap();
    let vcpu = Vcpu::new(&board.vm, 0, 1, &features, board.around.clone()).unwrap();
    vcpu.set_entry(GuestAddress(CODE)).unwrap();
    Some(held(board, memory, vcpu, false))
}

fn held(board: Board, memory: Memory, vcpu: Vcpu, clone: bool) -> Guest {
    let (ending, endings) = channel_of_endings().unwrap();
    let Board { vm, around, ports, registers, reset, .. } = board;
    let processor = Processor::start(vcpu, ending).unwrap();
    let live = Live::new(vm, memory.clone(), MIB, vec![processor], Vec::new(), around.exits, clone);
    Guest { live, memory, endings, ports, registers, reset }
}

impl Guest {
    fn counter(&self) -> u64 {
        self.memory.read_obj(GuestAddress(COUNTER)).unwrap()
    }

    fn wait_for(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < PATIENCE, "not in time: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn end(&self) -> Exit {
        let begun = Instant::now();
        loop {
            if let Some(exit) = self.endings.heard() {
                return exit;
            }
            assert!(begun.elapsed() < PATIENCE, "no end in time");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn end_of(code: &[u8]) -> Option<(Exit, Self)> {
        let mut guest = guest(code)?;
        guest.live.resume().unwrap();
        Some((guest.end(), guest))
    }
}

#[test]
fn a_machine_that_is_held_or_paused_does_nothing_and_goes_on_where_it_was() {
    let Some(mut guest) = guest(COUNT) else { return };
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.counter(), 0, "it runs before it is let go");
    guest.live.resume().unwrap();
    guest.wait_for("the guest counts", |guest| guest.counter() > 100);
    for _ in 0..20 {
        guest.live.pause().unwrap();
        let stopped_at = guest.counter();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(guest.counter(), stopped_at, "it runs while it is paused");
        guest.live.resume().unwrap();
        guest.wait_for("the guest goes on", |guest| guest.counter() > stopped_at);
    }
    guest.live.pause().unwrap();
}

#[test]
fn a_machine_that_was_saved_goes_on_counting_in_another_from_where_it_was() {
    let Some(mut first) = guest(COUNT) else { return };
    first.live.resume().unwrap();
    first.wait_for("the guest counts", |guest| guest.counter() > 1000);
    first.live.pause().unwrap();
    let saved_at = first.counter();
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    first.live.snapshot(&state, &memory).unwrap();
    assert_eq!(first.counter(), saved_at, "a snapshot changes nothing");

    let mut bytes = vec![0; usize::try_from(state.metadata().unwrap().len()).unwrap()];
    state.read_exact_at(&mut bytes, 0).unwrap();
    let saved = snapshot::decode(&bytes).unwrap();
    let memory = snapshot::map(&saved.memory, memory, true).unwrap();
    let board = board(&memory).unwrap();
    // Whether the host has the features is not asked: a KVM that is no good for Linux may give other ones than it lists.
    let vcpu = Vcpu::restored(&board.vm, 0, &saved.vcpus[0], board.around.clone()).unwrap();
    for chip in &saved.irqchips {
        board.vm.set_irqchip(chip).unwrap();
    }
    board.vm.set_pit2(&saved.pit).unwrap();
    board.vm.set_clock(&kvm_clock_data { clock: saved.clock.clock, ..Default::default() }).unwrap();
    let mut second = held(board, memory, vcpu, true);
    assert_eq!(second.counter(), saved_at);
    second.live.resume().unwrap();
    second.wait_for("the clone goes on", |guest| guest.counter() != saved_at);
    let found = second.counter();
    assert!(found > saved_at, "it went on from {found}, not from {saved_at}: its register was lost");

    // And neither of the two has anything to do with the other.
    assert_eq!(first.counter(), saved_at);
    first.live.resume().unwrap();
    first.wait_for("the first goes on as well", |guest| guest.counter() > saved_at);
    first.live.pause().unwrap();
    second.live.pause().unwrap();
}

#[test]
fn accesses_reach_their_device_with_their_width_and_its_answer_comes_back() {
    // mov al, 5a; out PORT, al; in al, PORT + 1; mov [COUNTER], al
    // mov dword [DEVICE + 8], 44332211; mov ax, [DEVICE + 2]; mov [COUNTER + 8], ax; ud2
    let code = [
        &[0xb0, 0x5a, 0xe6, 0x10, 0xe4, 0x11, 0x88, 0x04, 0x25, 0x00, 0x00, 0x20, 0x00][..],
        &[0xc7, 0x04, 0x25, 0x08, 0x00, 0x00, 0x08, 0x11, 0x22, 0x33, 0x44],
        &[0x66, 0x8b, 0x04, 0x25, 0x02, 0x00, 0x00, 0x08, 0x66, 0x89, 0x04, 0x25, 0x08, 0x00, 0x20, 0x00],
        CRASH,
    ]
    .concat();
    let Some((_, guest)) = Guest::end_of(&code) else { return };
    assert_eq!(*guest.ports.0.lock().unwrap(), [(0, vec![0x5a]), (1, vec![])]);
    assert_eq!(*guest.registers.0.lock().unwrap(), [(8, vec![0x11, 0x22, 0x33, 0x44]), (2, vec![])]);
    assert_eq!(guest.counter(), 1);
    assert_eq!(guest.memory.read_obj::<u16>(GuestAddress(COUNTER + 8)).unwrap(), 0x0201);
}

#[test]
fn what_answers_nowhere_reads_as_ones_and_ends_nothing() {
    // in al, 77; mov [COUNTER], al; mov eax, [DEVICE + 1000h]; mov [COUNTER + 1], eax; out 77, al; ud2
    let code = [
        &[0xe4, 0x77, 0x88, 0x04, 0x25, 0x00, 0x00, 0x20, 0x00][..],
        &[0x8b, 0x04, 0x25, 0x00, 0x10, 0x00, 0x08, 0x89, 0x04, 0x25, 0x01, 0x00, 0x20, 0x00, 0xe6, 0x77],
        CRASH,
    ]
    .concat();
    let Some((exit, guest)) = Guest::end_of(&code) else { return };
    assert_eq!(guest.counter(), 0xff_ffff_ffff);
    assert!(matches!(exit, Exit::Crash(_)), "{exit:?}");
}

#[test]
fn a_triple_fault_is_reported_as_the_guests_crash() {
    let Some((exit, _)) = Guest::end_of(CRASH) else { return };
    let Exit::Crash(why) = exit else { panic!("{exit:?}") };
    assert!(why.contains("triple fault on processor 0"), "{why}");
}

#[test]
fn a_device_that_refuses_to_go_on_ends_the_machine_with_its_words() {
    // mov al, ee; out PORT, al
    let Some((exit, _)) = Guest::end_of(&[0xb0, 0xee, 0xe6, 0x10]) else { return };
    let Exit::Fault(error) = exit else { panic!("{exit:?}") };
    assert_eq!(error.to_string(), "the guest broke a rule of spy: ee");
}

#[test]
fn a_reset_by_the_keyboard_controller_is_heard() {
    // mov al, fe; out 64, al; hlt; jmp
    let code = [&[0xb0, 0xfe, 0xe6, 0x64], HALT].concat();
    let Some(mut guest) = guest(&code) else { return };
    guest.live.resume().unwrap();
    guest.wait_for("the reset", |guest| guest.reset.read().is_ok());
}

/// Nothing will ever wake it, and still it can be stopped, saved and looked at.
#[test]
fn a_processor_that_halted_for_good_can_be_paused_and_saved() {
    let Some(mut guest) = guest(HALT) else { return };
    guest.live.resume().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    guest.live.pause().unwrap();
    guest.live.snapshot(&tempfile::tempfile().unwrap(), &tempfile::tempfile().unwrap()).unwrap();
    guest.live.resume().unwrap();
    guest.live.pause().unwrap();
    assert!(guest.endings.heard().is_none(), "a processor that waits is not the end of a machine");
}
