//! The status machine against a model of it, under every access at every moment.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::{super::feature, Phase, Transport, TransportState, register, status};
use crate::{
    Error,
    bus::Registers,
    devices::virtio::{Activation, Device, Interrupt},
    memory::Memory,
};
use proptest::prelude::*;
use std::sync::{Arc, Mutex};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

/// What the device was told, and what it was given.
#[derive(Debug, Default)]
struct Told {
    activations: u32,
    sleeps: u32,
    clonings: u32,
    features: u64,
    /// Size and addresses of each queue, as they were handed over.
    queues: Vec<(u16, u64, u64, u64)>,
}

struct Spy {
    told: Arc<Mutex<Told>>,
    queues: Vec<Queue>,
}

const SIZES: [u16; 2] = [256, 64];
const OFFERED: u64 = feature::RING | 0b101;

impl Device for Spy {
    fn name(&self) -> &'static str {
        "spy"
    }
    fn id(&self) -> u32 {
        42
    }
    fn features(&self) -> u64 {
        OFFERED
    }
    fn queue_sizes(&self) -> &[u16] {
        &SIZES
    }
    fn config(&self) -> &[u8] {
        &[1, 2, 3, 4, 5, 6]
    }
    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        let mut told = self.told.lock().unwrap();
        told.activations += 1;
        told.features = activation.features;
        let given = activation.queues.iter();
        told.queues = given.map(|q| (q.size(), q.desc_table(), q.avail_ring(), q.used_ring())).collect();
        self.queues = activation.queues;
        Ok(())
    }
    fn sleep(&mut self) -> Result<Vec<Queue>, Error> {
        self.told.lock().unwrap().sleeps += 1;
        Ok(std::mem::take(&mut self.queues))
    }
    fn cloned(&mut self) -> Result<(), Error> {
        self.told.lock().unwrap().clonings += 1;
        Ok(())
    }
}

fn transport() -> (Transport, Arc<Mutex<Told>>) {
    let told = Arc::new(Mutex::new(Told::default()));
    let memory = Memory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let interrupt = Arc::new(Interrupt::new(EventFd::new(0).unwrap()));
    let spy = Spy { told: told.clone(), queues: Vec::new() };
    (Transport::new(Box::new(spy), interrupt, memory).unwrap(), told)
}

/// Another transport, with a device of its own, that takes up what one saved.
fn restored(saved: &TransportState) -> Result<(Transport, Arc<Mutex<Told>>), Error> {
    let told = Arc::new(Mutex::new(Told::default()));
    let memory = Memory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let interrupt = Arc::new(Interrupt::new(EventFd::new(0).unwrap()));
    let spy = Spy { told: told.clone(), queues: Vec::new() };
    Ok((Transport::restore(Box::new(spy), interrupt, memory, saved)?, told))
}

fn write(transport: &Transport, offset: u64, value: u32) {
    transport.write(offset, &value.to_le_bytes()).unwrap();
}

fn read(transport: &Transport, offset: u64) -> u32 {
    let mut data = [0; 4];
    transport.read(offset, &mut data).unwrap();
    u32::from_le_bytes(data)
}

const ACK: u32 = status::ACKNOWLEDGE;
const DRIVER: u32 = ACK | status::DRIVER;
const FEATURES_OK: u32 = DRIVER | status::FEATURES_OK;
const LIVE: u32 = FEATURES_OK | status::DRIVER_OK;

fn negotiate(transport: &Transport, features: u64) {
    write(transport, register::STATUS, 0);
    write(transport, register::STATUS, ACK);
    write(transport, register::STATUS, DRIVER);
    for (half, value) in [features as u32, (features >> 32) as u32].into_iter().enumerate() {
        write(transport, register::DRIVER_FEATURES_SEL, half as u32);
        write(transport, register::DRIVER_FEATURES, value);
    }
    write(transport, register::STATUS, FEATURES_OK);
}

fn set_up_queue(transport: &Transport, index: u32) {
    write(transport, register::QUEUE_SEL, index);
    write(transport, register::QUEUE_NUM, 16);
    for (offset, address) in [
        (register::QUEUE_DESC_LOW, 0x1000),
        (register::QUEUE_DRIVER_LOW, 0x2000),
        (register::QUEUE_DEVICE_LOW, 0x3000),
    ] {
        write(transport, offset, address + index * 0x4000);
    }
    write(transport, register::QUEUE_READY, 1);
}

fn live() -> (Transport, Arc<Mutex<Told>>) {
    let (transport, told) = transport();
    negotiate(&transport, feature::VERSION_1 | 1);
    set_up_queue(&transport, 0);
    set_up_queue(&transport, 1);
    write(&transport, register::STATUS, LIVE);
    (transport, told)
}

#[test]
fn a_driver_that_follows_the_specification_gets_its_device() {
    let (transport, told) = live();
    assert_eq!(read(&transport, register::STATUS), LIVE);
    let told = told.lock().unwrap();
    assert_eq!((told.activations, told.features), (1, feature::VERSION_1 | 1));
    assert_eq!(told.queues, [(16, 0x1000, 0x2000, 0x3000), (16, 0x5000, 0x6000, 0x7000)]);
}

#[test]
fn features_that_were_not_offered_or_lack_version_1_are_refused() {
    for refused in [feature::VERSION_1 | 2, 1, feature::VERSION_1 | 1 << 63] {
        let (transport, _) = transport();
        negotiate(&transport, refused);
        assert_eq!(read(&transport, register::STATUS), DRIVER, "{refused:#x}");
    }
}

#[test]
fn a_queue_outside_memory_ends_the_machine_at_activation() {
    let (transport, told) = transport();
    negotiate(&transport, feature::VERSION_1);
    set_up_queue(&transport, 0);
    set_up_queue(&transport, 1);
    write(&transport, register::QUEUE_READY, 0);
    write(&transport, register::QUEUE_DESC_HIGH, 1);
    write(&transport, register::QUEUE_READY, 1);
    let outcome = transport.write(register::STATUS, &LIVE.to_le_bytes());
    assert!(matches!(outcome, Err(Error::Guest { .. })), "{outcome:?}");
    assert_eq!(told.lock().unwrap().activations, 0);
}

/// Partial, wide and misaligned accesses: reads give ones, writes nothing.
#[test]
fn odd_accesses_change_nothing_and_read_as_ones() {
    let (transport, _) = transport();
    for (offset, width) in [(0, 1), (0, 2), (0, 8), (1, 4), (register::STATUS + 2, 4), (register::STATUS, 2)]
    {
        let mut data = vec![0; width];
        transport.read(offset, &mut data).unwrap();
        assert!(data.iter().all(|b| *b == 0xff), "{width} bytes at {offset:#x}");
        transport.write(offset, &vec![1; width]).unwrap();
    }
    assert_eq!(read(&transport, register::STATUS), 0);
    let mut config = [0; 8];
    transport.read(register::CONFIG + 2, &mut config).unwrap();
    assert_eq!(config, [3, 4, 5, 6, 0xff, 0xff, 0xff, 0xff]);
    transport.read(register::CONFIG + 0xe00, &mut config).unwrap();
    assert_eq!(config, [0xff; 8]);
}

#[test]
fn a_sleeping_device_holds_no_queues_and_wakes_with_the_same_ones() {
    let (transport, told) = live();
    assert!(transport.save().is_err(), "an awake device was saved");
    transport.sleep().unwrap();
    transport.sleep().unwrap();
    transport.wake(false).unwrap();
    transport.wake(false).unwrap();
    let told = told.lock().unwrap();
    assert_eq!((told.activations, told.sleeps, told.clonings), (2, 1, 0));
    assert_eq!(told.queues, [(16, 0x1000, 0x2000, 0x3000), (16, 0x5000, 0x6000, 0x7000)]);
    assert_eq!(read(&transport, register::STATUS), LIVE);
}

#[test]
fn a_saved_device_is_taken_up_as_it_was_and_told_that_it_is_a_clone() {
    let (transport, _) = live();
    transport.sleep().unwrap();
    let saved = transport.save().unwrap();
    let (clone, told) = restored(&saved).unwrap();
    assert_eq!(clone.save().unwrap(), saved);
    clone.wake(true).unwrap();
    assert_eq!(read(&clone, register::STATUS), LIVE);
    let told = told.lock().unwrap();
    assert_eq!((told.activations, told.clonings, told.features), (1, 1, feature::VERSION_1 | 1));
    assert_eq!(told.queues, [(16, 0x1000, 0x2000, 0x3000), (16, 0x5000, 0x6000, 0x7000)]);
}

#[test]
fn a_device_that_no_driver_touched_sleeps_wakes_and_is_saved_like_any_other() {
    let (transport, told) = transport();
    transport.sleep().unwrap();
    let (clone, cloned) = restored(&transport.save().unwrap()).unwrap();
    clone.wake(true).unwrap();
    transport.wake(false).unwrap();
    for told in [told, cloned] {
        let told = told.lock().unwrap();
        assert_eq!((told.activations, told.sleeps, told.clonings), (0, 0, 0));
    }
}

#[test]
fn a_state_that_is_not_this_devices_is_refused() {
    let (transport, _) = live();
    transport.sleep().unwrap();
    let saved = transport.save().unwrap();
    let wrong: [fn(&mut TransportState); 9] = [
        |state| state.queues.truncate(1),
        |state| state.queues.swap(0, 1),
        |state| state.driver_features |= 1 << 60,
        |state| state.active = false,
        |state| state.driver_features = u64::MAX,
        // Nothing a driver could have brought about.
        |state| state.phase = Phase::Driver,
        |state| state.phase = Phase::Reset,
        |state| state.driver_features &= !feature::VERSION_1,
        |state| state.driver_features ^= feature::EVENT_IDX,
    ];
    for change in wrong {
        let mut state = saved.clone();
        change(&mut state);
        assert!(matches!(restored(&state), Err(Error::Snapshot(_))), "{state:?}");
    }
}

#[derive(Debug, Clone, Copy)]
struct Access {
    offset: u64,
    value: u32,
}

fn access() -> impl Strategy<Value = Access> {
    let offset = prop_oneof![
        4 => Just(register::STATUS),
        4 => (0_u64..0x40).prop_map(|word| word * 4),
        1 => 0_u64..0x200,
    ];
    let value = prop_oneof![
        3 => prop::sample::select(vec![0, ACK, DRIVER, FEATURES_OK, LIVE, status::FAILED, LIVE | status::FAILED]),
        2 => 0_u32..4,
        1 => Just(16),
        1 => any::<u32>(),
    ];
    (offset, value).prop_map(|(offset, value)| Access { offset, value })
}

proptest! {
    /// Whatever a driver writes, in whatever order: the status only takes the steps the specification has, the device is
    /// activated exactly when it becomes live and put to sleep exactly when it stops being so.
    #[test]
    fn no_sequence_of_writes_leaves_the_status_machine(accesses in prop::collection::vec(access(), 1..200)) {
        let (transport, told) = transport();
        let mut before = 0;
        let (mut activations, mut sleeps, mut active) = (0, 0, false);
        for Access { offset, value } in accesses {
            let outcome = transport.write(offset, &value.to_le_bytes());
            if outcome.is_err() {
                // The machine ends here; only activation can do that.
                prop_assert_eq!((offset, value, before), (register::STATUS, LIVE, FEATURES_OK));
                return Ok(());
            }
            let after = read(&transport, register::STATUS);
            if after != before {
                prop_assert_eq!(offset, register::STATUS);
                let legal = matches!(
                    (before, after),
                    (_, 0 | status::FAILED) | (0, ACK) | (ACK, DRIVER) | (DRIVER, FEATURES_OK) | (FEATURES_OK, LIVE)
                );
                prop_assert!(legal, "{:#x} -> {:#x}", before, after);
                if after == LIVE {
                    activations += 1;
                    active = true;
                }
                // Also one that was given up on the way.
                if after == 0 && std::mem::take(&mut active) {
                    sleeps += 1;
                }
            }
            before = after;
        }
        let told = told.lock().unwrap();
        prop_assert_eq!((told.activations, told.sleeps), (activations, sleeps));
    }

    /// A live device's queues and features are what they were: no write changes them, short of a reset.
    #[test]
    fn a_live_device_is_fixed(accesses in prop::collection::vec(access(), 1..100)) {
        let (transport, told) = live();
        for Access { offset, value } in accesses {
            if offset != register::STATUS {
                transport.write(offset, &value.to_le_bytes()).unwrap();
            }
        }
        prop_assert_eq!(read(&transport, register::STATUS), LIVE);
        let told = told.lock().unwrap();
        prop_assert_eq!(told.queues.clone(), vec![(16, 0x1000, 0x2000, 0x3000), (16, 0x5000, 0x6000, 0x7000)]);
        prop_assert_eq!((told.activations, told.sleeps, told.features), (1, 0, feature::VERSION_1 | 1));
    }
}
