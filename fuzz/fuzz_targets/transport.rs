//! The MMIO transport under any sequence of register accesses.
//!
//! An input is accesses of eight bytes: how (bit 7: a read; the rest modulo 8: how wide), a register's number or, with bit 6
//! of the first byte, an offset (two bytes), one byte unused, and the value (four bytes).
//!
//! What must hold is what the specification has for a driver's view of the status machine: it takes the steps there are and no
//! others, a device is activated exactly when it goes live, with queues in memory and features that were offered, and put
//! to sleep exactly when a live one is reset; nothing but activation ends the machine.

#![no_main]

use bivouac_fuzz::{Input, Spy};
use bivouac_vmm::{
    bus::Registers,
    devices::virtio::{
        Interrupt,
        transport::{Transport, status},
    },
    memory::Memory,
};
use libfuzzer_sys::fuzz_target;
use std::{cell::OnceCell, sync::Arc};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const STATUS: u64 = 0x70;
const SIZES: [u16; 3] = [64, 256, 16];
const ACK: u32 = status::ACKNOWLEDGE;
const DRIVER: u32 = ACK | status::DRIVER;
const FEATURES_OK: u32 = DRIVER | status::FEATURES_OK;
const LIVE: u32 = FEATURES_OK | status::DRIVER_OK;

thread_local! {
    static MEMORY: OnceCell<Memory> = const { OnceCell::new() };
}

fn status_of(transport: &Transport) -> u32 {
    let mut word = [0; 4];
    transport.read(STATUS, &mut word).expect("reads never fail");
    u32::from_le_bytes(word)
}

fuzz_target!(|bytes: &[u8]| {
    let memory = MEMORY.with(|memory| {
        memory.get_or_init(|| Memory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()).clone()
    });
    let (spy, told) = Spy::new(&SIZES);
    let interrupt = Arc::new(Interrupt::new(EventFd::new(EFD_NONBLOCK).unwrap()));
    let transport = Transport::new(Box::new(spy), interrupt, memory).unwrap();

    let mut input = Input::new(bytes);
    let (mut before, mut activations, mut sleeps, mut active) = (0, 0, 0, false);
    while !input.is_empty() {
        let (how, place, _, value) = (input.byte(), input.short(), input.byte(), input.word());
        let offset = if how & 0x40 == 0 { u64::from(place % 0x80) * 4 } else { u64::from(place % 0x1000) };
        let width = [4, 4, 4, 4, 1, 2, 8, 3][usize::from(how % 8)];
        if how & 0x80 != 0 {
            let mut data = [0; 8];
            transport.read(offset, &mut data[..width]).expect("reads never fail");
            assert_eq!(status_of(&transport), before, "a read changed the status");
            continue;
        }
        let mut data = [0; 8];
        data[..4].copy_from_slice(&value.to_le_bytes());
        if transport.write(offset, &data[..width]).is_err() {
            assert_eq!((offset, width, value, before), (STATUS, 4, LIVE, FEATURES_OK));
            return;
        }
        let after = status_of(&transport);
        if after != before {
            assert_eq!((offset, width), (STATUS, 4));
            assert!(matches!(
                (before, after),
                (_, 0 | status::FAILED)
                    | (0, ACK)
                    | (ACK, DRIVER)
                    | (DRIVER, FEATURES_OK)
                    | (FEATURES_OK, LIVE)
            ));
            if after == LIVE {
                activations += 1;
                active = true;
            }
            if after == 0 && std::mem::take(&mut active) {
                sleeps += 1;
            }
        }
        before = after;
        let told = told.lock().unwrap();
        assert_eq!((told.activations, told.sleeps), (activations, sleeps));
    }
});
