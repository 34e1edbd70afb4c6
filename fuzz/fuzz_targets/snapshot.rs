//! A saved machine that was made up: its state file, its devices, its memory, its processor's features.
//!
//! The first byte, modulo 4, says what the rest is:
//!
//! | | the rest |
//! | --- | --- |
//! | 0 | the body of a state file, to which a header is made that fits |
//! | 1 | a whole state file |
//! | 2 | one device's state (postcard); behind its length, a byte of sixteenths, accesses as in `transport` |
//! | 3 | processor features, of a saved machine and of a host: entries of 12 bytes (function, index, register, bits), in turn |
//!
//! What must hold: whatever is taken up can be saved again and is then the same; a device that is taken up is in one of the states
//! that a driver could have brought it to, is given to its device exactly if it was, with queues in memory and with features that
//! are offered, and lives on by the rules of the transport; memory is mapped only from a file of just its size; a host that takes
//! a machine has every feature that the machine counts on.

#![no_main]

use bivouac_fuzz::{Input, Spy};
use bivouac_protocol::monitor;
use bivouac_vmm::{
    bus::Registers,
    devices::virtio::{
        Interrupt,
        transport::{Transport, TransportState, status},
    },
    memory::Memory,
    snapshot::{self, MachineState},
};
use kvm_bindings::kvm_cpuid_entry2;
use libfuzzer_sys::fuzz_target;
use std::{cell::OnceCell, fs::File, os::fd::FromRawFd, sync::Arc};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const STATUS: u64 = 0x70;
const SIZES: [u16; 2] = [64, 256];
const FEATURES_OK: u32 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
const LIVE: u32 = FEATURES_OK | status::DRIVER_OK;
/// A machine whose whole memory is read takes too long for more than a few.
const VERIFIED_MIB: u32 = 64;

thread_local! {
    static MEMORY: OnceCell<Memory> = const { OnceCell::new() };
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input::new(bytes);
    match input.byte() % 4 {
        0 => machine(&with_header(input.rest())),
        1 => machine(input.rest()),
        2 => {
            let length = usize::from(input.byte()) * 16;
            if let Ok(state) = monitor::decode(input.bytes(length)) {
                device(&state, &mut input);
            }
        }
        _ => features(&mut input),
    }
});

/// The layout is at the top of vmm/src/snapshot/file.rs.
fn with_header(body: &[u8]) -> Vec<u8> {
    let words = [1_u32.to_le_bytes(), crc32fast::hash(body).to_le_bytes()];
    [b"bivouac\0", words.as_flattened(), &(body.len() as u64).to_le_bytes(), body].concat()
}

fn machine(file: &[u8]) {
    let Ok(state) = snapshot::decode(file) else { return };
    let written = snapshot::encode(&state).expect("what was read can be written");
    let again = snapshot::decode(&written).expect("and read again");
    assert_eq!(snapshot::encode(&again).expect("as often as one likes"), written);
    for vcpu in &state.vcpus {
        snapshot::check_processor(&vcpu.cpuid, &vcpu.cpuid).ok();
    }
    for saved in state.devices.iter().take(8) {
        device(&saved.transport, &mut Input::new(&[]));
    }
    map(&state);
}

fn map(state: &MachineState) {
    // SAFETY: a constant name, and a descriptor that is then owned by the file alone.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"memory".as_ptr(), libc::MFD_CLOEXEC)) };
    assert!(
        snapshot::map(&state.memory, file.try_clone().unwrap(), false).is_err(),
        "an empty file is no memory"
    );
    let bytes = u64::from(state.memory.mib) << 20;
    if file.set_len(bytes).is_err() {
        return;
    }
    let verify = state.memory.mib <= VERIFIED_MIB;
    if let Ok(memory) = snapshot::map(&state.memory, file, verify) {
        assert_eq!(memory.iter().map(GuestMemoryRegion::len).sum::<u64>(), bytes);
    }
}

fn status_of(transport: &Transport) -> u32 {
    let mut word = [0; 4];
    transport.read(STATUS, &mut word).expect("reads never fail");
    u32::from_le_bytes(word)
}

fn device(saved: &TransportState, input: &mut Input<'_>) {
    let memory = MEMORY.with(|memory| {
        memory.get_or_init(|| Memory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()).clone()
    });
    let (spy, told) = Spy::new(&SIZES);
    let holds = || told.lock().unwrap().holds();
    let interrupt = Arc::new(Interrupt::new(EventFd::new(EFD_NONBLOCK).unwrap()));
    let Ok(transport) = Transport::restore(Box::new(spy), interrupt, memory, saved) else { return };
    assert_eq!(transport.save().expect("it sleeps"), *saved, "it is not what it was");
    assert!(!holds(), "it woke up by itself");

    transport.wake(input.byte() & 1 != 0).expect("what was checked can be used");
    let mut before = status_of(&transport);
    let mut active = holds();
    assert!(if active { before == LIVE || before == status::FAILED } else { before != LIVE });
    while !input.is_empty() {
        let (how, place, value) = (input.byte(), input.byte(), input.word());
        if how == 0xff {
            transport.sleep().expect("it can always sleep");
            assert!(!holds(), "it sleeps and has its queues");
            let saved = transport.save().expect("it sleeps");
            assert_eq!(monitor::decode::<TransportState>(&monitor::encode(&saved).unwrap()).unwrap(), saved);
            transport.wake(false).expect("and wake again");
            assert_eq!(holds(), active);
            continue;
        }
        let written = transport.write(u64::from(place % 0x80) * 4, &value.to_le_bytes());
        if written.is_err() {
            assert_eq!((place % 0x80, value, before), (0x1c, LIVE, FEATURES_OK));
            return;
        }
        before = status_of(&transport);
        active = holds();
        assert!(if active { before == LIVE || before == status::FAILED } else { before != LIVE });
    }
}

fn features(input: &mut Input<'_>) {
    let mut entries: [Vec<kvm_cpuid_entry2>; 2] = Default::default();
    let mut turn = 0;
    while !input.is_empty() {
        let (function, index, register, bits) = (input.word(), input.short(), input.short(), input.word());
        let function =
            [0, 1, 7, 0xd, 0x8000_0001, 0x8000_0008, 0x4000_0001, function][(function % 8) as usize];
        let mut entry = kvm_cpuid_entry2 { function, index: u32::from(index % 4), ..Default::default() };
        *[&mut entry.eax, &mut entry.ebx, &mut entry.ecx, &mut entry.edx][usize::from(register % 4)] = bits;
        entries[turn % 2].push(entry);
        turn += 1;
    }
    let [saved, host] = &entries;
    let known = |entry: &kvm_cpuid_entry2| {
        let found = host.iter().find(|other| (other.function, other.index) == (entry.function, entry.index));
        found.copied().unwrap_or_default()
    };
    if snapshot::check_processor(saved, host).is_ok() {
        for entry in saved {
            let lacks = match entry.function {
                7 => entry.ebx & !known(entry).ebx,
                0x8000_0001 => entry.ecx & !known(entry).ecx,
                _ => 0,
            };
            assert_eq!(lacks, 0, "a host that lacks a feature takes the machine");
        }
    }
}
