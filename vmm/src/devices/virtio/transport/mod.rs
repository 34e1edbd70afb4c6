//! The MMIO transport (virtio 1.2, section 4.2): every register access of every device passes through here.
//!
//! The status machine is in this file and nowhere else. Features can be chosen only between DRIVER and FEATURES_OK,
//! queues only between FEATURES_OK and DRIVER_OK; after that both are fixed, and the queues belong to the device.
//! What a driver writes at any other time is ignored, as is any access that is not an aligned 32-bit one: reads of it
//! give ones.
//!
//! A machine that is paused puts each device to sleep: an active one gives its queues back, and they stand here until
//! [`Transport::wake`] or [`Transport::save`]. No register is accessed meanwhile, since no processor runs.

mod state;
#[cfg(test)]
mod tests;

pub use state::TransportState;

use super::{Activation, Device, Interrupt};
use crate::{
    Error,
    bus::{ABSENT, Registers},
    memory::Memory,
};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, PoisonError};
use virtio_queue::{Queue, QueueT};

/// Register offsets (table 4.1).
mod register {
    pub const MAGIC: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const DEVICE_ID: u64 = 0x08;
    pub const VENDOR_ID: u64 = 0x0c;
    pub const DEVICE_FEATURES: u64 = 0x10;
    pub const DEVICE_FEATURES_SEL: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SEL: u64 = 0x24;
    pub const QUEUE_SEL: u64 = 0x30;
    pub const QUEUE_NUM_MAX: u64 = 0x34;
    pub const QUEUE_NUM: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const QUEUE_NOTIFY: u64 = 0x50;
    pub const INTERRUPT_STATUS: u64 = 0x60;
    pub const INTERRUPT_ACK: u64 = 0x64;
    pub const STATUS: u64 = 0x70;
    pub const QUEUE_DESC_LOW: u64 = 0x80;
    pub const QUEUE_DESC_HIGH: u64 = 0x84;
    pub const QUEUE_DRIVER_LOW: u64 = 0x90;
    pub const QUEUE_DRIVER_HIGH: u64 = 0x94;
    pub const QUEUE_DEVICE_LOW: u64 = 0xa0;
    pub const QUEUE_DEVICE_HIGH: u64 = 0xa4;
    /// Shared memory regions: their length and base read as all ones where there is none.
    pub const SHM_LEN_LOW: u64 = 0xb0;
    pub const SHM_BASE_HIGH: u64 = 0xbc;
    pub const CONFIG_GENERATION: u64 = 0xfc;
    pub const CONFIG: u64 = 0x100;
}

/// Offset of the register that a driver writes a queue's index to; each index has an ioeventfd on it.
pub const QUEUE_NOTIFY: u64 = register::QUEUE_NOTIFY;

/// "virt"
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "bivo"
const VENDOR: u32 = 0x6f76_6962;

/// Device status bits (section 2.1).
pub mod status {
    pub const ACKNOWLEDGE: u32 = 1;
    pub const DRIVER: u32 = 2;
    pub const DRIVER_OK: u32 = 4;
    pub const FEATURES_OK: u32 = 8;
    pub const FAILED: u32 = 128;
}

/// How far the driver has come. Each state is entered from the one above it, and [`Phase::Reset`] from all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Phase {
    #[default]
    Reset,
    Acknowledged,
    Driver,
    FeaturesOk,
    Live,
    /// The driver gave up, and only a reset helps.
    Failed,
}

impl Phase {
    fn bits(self) -> u32 {
        use status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK};
        match self {
            Self::Reset => 0,
            Self::Acknowledged => ACKNOWLEDGE,
            Self::Driver => ACKNOWLEDGE | DRIVER,
            Self::FeaturesOk => ACKNOWLEDGE | DRIVER | FEATURES_OK,
            Self::Live => ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK,
            Self::Failed => FAILED,
        }
    }
}

struct State {
    phase: Phase,
    /// The device has been given its queues, and has them unless it sleeps.
    active: bool,
    /// The machine is paused.
    asleep: bool,
    device: Box<dyn Device>,
    device_features_sel: u32,
    driver_features: u64,
    driver_features_sel: u32,
    queue_sel: u32,
    /// Empty while they are the device's: when it is active and awake.
    queues: Vec<Queue>,
}

pub struct Transport {
    state: Mutex<State>,
    interrupt: Arc<Interrupt>,
    memory: Memory,
}

impl Transport {
    pub fn new(device: Box<dyn Device>, interrupt: Arc<Interrupt>, memory: Memory) -> Result<Self, Error> {
        let queues = fresh_queues(device.as_ref())?;
        let state = State {
            phase: Phase::Reset,
            active: false,
            asleep: false,
            device,
            device_features_sel: 0,
            driver_features: 0,
            driver_features_sel: 0,
            queue_sel: 0,
            queues,
        };
        Ok(Self { state: Mutex::new(state), interrupt, memory })
    }

    /// Takes up a saved device, asleep.
    pub fn restore(
        device: Box<dyn Device>,
        interrupt: Arc<Interrupt>,
        memory: Memory,
        saved: &TransportState,
    ) -> Result<Self, Error> {
        let queues = state::check(saved, device.as_ref(), &memory)?;
        interrupt.restore(saved.interrupt_status);
        let state = State {
            phase: saved.phase,
            active: saved.active,
            asleep: true,
            device,
            device_features_sel: saved.device_features_sel,
            driver_features: saved.driver_features,
            driver_features_sel: saved.driver_features_sel,
            queue_sel: saved.queue_sel,
            queues,
        };
        Ok(Self { state: Mutex::new(state), interrupt, memory })
    }

    /// Stops the device. To be called with every processor paused; once more does nothing.
    pub fn sleep(&self) -> Result<(), Error> {
        let mut state = self.state();
        if !std::mem::replace(&mut state.asleep, true) && state.active {
            state.queues = state.device.sleep()?;
        }
        Ok(())
    }

    /// Lets the device go on, if it was active. `cloned`: as another machine than the one it went to sleep in.
    ///
    /// The driver is interrupted once in any case: what it was told before may have got lost with an interrupt
    /// controller that was saved in between, and a call for nothing is harmless.
    pub fn wake(&self, cloned: bool) -> Result<(), Error> {
        let mut state = self.state();
        if !std::mem::replace(&mut state.asleep, false) || !state.active {
            return Ok(());
        }
        self.hand_over(&mut state)?;
        if cloned {
            state.device.cloned()?;
        }
        self.interrupt.used_buffer().map_err(Error::io("interrupt the guest"))
    }

    /// What a sleeping device's transport holds.
    pub fn save(&self) -> Result<TransportState, Error> {
        let state = self.state();
        if !state.asleep {
            return Err(Error::Snapshot(format!("{} device is awake", state.device.name())));
        }
        Ok(TransportState {
            phase: state.phase,
            active: state.active,
            interrupt_status: self.interrupt.pending(),
            device_features_sel: state.device_features_sel,
            driver_features: state.driver_features,
            driver_features_sel: state.driver_features_sel,
            queue_sel: state.queue_sel,
            queues: state.queues.iter().map(Into::into).collect(),
        })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // A poisoned lock means a vCPU thread panicked, and `panic = abort` has ended the process by then.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_register(&self, offset: u64) -> u32 {
        let state = self.state();
        match offset {
            register::MAGIC => MAGIC,
            register::VERSION => VERSION,
            register::DEVICE_ID => state.device.id(),
            register::VENDOR_ID => VENDOR,
            register::DEVICE_FEATURES => half(state.device.features(), state.device_features_sel),
            register::QUEUE_NUM_MAX => {
                state.device.queue_sizes().get(state.queue_sel as usize).map_or(0, |size| u32::from(*size))
            }
            register::QUEUE_READY => match state.phase {
                // The queues are with the device, and every one it has is in use or was never made ready.
                Phase::Live => u32::from((state.queue_sel as usize) < state.device.queue_sizes().len()),
                _ => state.queues.get(state.queue_sel as usize).map_or(0, |queue| u32::from(queue.ready())),
            },
            register::INTERRUPT_STATUS => self.interrupt.status(),
            register::STATUS => state.phase.bits(),
            register::SHM_LEN_LOW..=register::SHM_BASE_HIGH => u32::MAX,
            // Configuration spaces never change here.
            register::CONFIG_GENERATION => 0,
            _ => u32::MAX,
        }
    }

    fn write_register(&self, offset: u64, value: u32) -> Result<(), Error> {
        let mut state = self.state();
        match offset {
            register::DEVICE_FEATURES_SEL => state.device_features_sel = value,
            register::DRIVER_FEATURES_SEL => state.driver_features_sel = value,
            register::DRIVER_FEATURES if state.phase == Phase::Driver => state.accept_features(value),
            register::QUEUE_SEL => state.queue_sel = value,
            register::INTERRUPT_ACK => self.interrupt.acknowledge(value),
            register::STATUS => return self.write_status(&mut state, value),
            _ if state.phase == Phase::FeaturesOk => state.configure_queue(offset, value),
            // Kicks arrive through ioeventfds; one that comes here names a queue the device does not have.
            _ => {}
        }
        Ok(())
    }

    fn write_status(&self, state: &mut State, value: u32) -> Result<(), Error> {
        if value == 0 {
            return state.reset();
        }
        if value & status::FAILED != 0 {
            state.phase = Phase::Failed;
            return Ok(());
        }
        let next = match state.phase {
            Phase::Reset => Phase::Acknowledged,
            Phase::Acknowledged => Phase::Driver,
            Phase::Driver => Phase::FeaturesOk,
            Phase::FeaturesOk => Phase::Live,
            Phase::Live | Phase::Failed => return Ok(()),
        };
        if value != next.bits() {
            return Ok(());
        }
        match next {
            // Refused features leave FEATURES_OK clear, which is how the driver learns of it (section 3.1.1).
            Phase::FeaturesOk if !state.features_acceptable() => return Ok(()),
            Phase::Live => self.activate(state)?,
            _ => {}
        }
        state.phase = next;
        Ok(())
    }

    fn activate(&self, state: &mut State) -> Result<(), Error> {
        let device = state.device.name();
        let event_idx = state.driver_features & super::feature::EVENT_IDX != 0;
        for (index, queue) in state.queues.iter_mut().enumerate() {
            queue.set_event_idx(event_idx);
            if !queue.is_valid(&self.memory) {
                return Err(Error::Guest {
                    device,
                    why: format!("queue {index} was not made ready, or does not lie in guest memory"),
                });
            }
        }
        self.hand_over(state)?;
        state.active = true;
        Ok(())
    }

    /// Moves the queues into the device.
    fn hand_over(&self, state: &mut State) -> Result<(), Error> {
        let queues = std::mem::take(&mut state.queues);
        state.device.activate(Activation {
            features: state.driver_features,
            queues,
            interrupt: Arc::clone(&self.interrupt),
            memory: self.memory.clone(),
        })
    }
}

impl State {
    fn accept_features(&mut self, value: u32) {
        let value = u64::from(value);
        match self.driver_features_sel {
            0 => self.driver_features = (self.driver_features & !0xffff_ffff) | value,
            1 => self.driver_features = (self.driver_features & 0xffff_ffff) | (value << 32),
            _ => {}
        }
    }

    fn features_acceptable(&self) -> bool {
        let offered = self.device.features();
        self.driver_features & !offered == 0 && self.driver_features & super::feature::VERSION_1 != 0
    }

    fn configure_queue(&mut self, offset: u64, value: u32) {
        let Some(queue) = self.queues.get_mut(self.queue_sel as usize) else { return };
        match offset {
            register::QUEUE_READY => queue.set_ready(value == 1),
            // A queue that is ready is fixed until it is made unready or the device is reset.
            _ if queue.ready() => {}
            // The crate takes only powers of two up to the maximum, and keeps the old size otherwise.
            register::QUEUE_NUM => queue.set_size(u16::try_from(value).unwrap_or(0)),
            register::QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
            register::QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
            register::QUEUE_DRIVER_LOW => queue.set_avail_ring_address(Some(value), None),
            register::QUEUE_DRIVER_HIGH => queue.set_avail_ring_address(None, Some(value)),
            register::QUEUE_DEVICE_LOW => queue.set_used_ring_address(Some(value), None),
            register::QUEUE_DEVICE_HIGH => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    fn reset(&mut self) -> Result<(), Error> {
        // Not the phase: a driver that gave up a live device left it with its queues.
        if std::mem::take(&mut self.active) {
            self.device.sleep()?;
        }
        self.queues = fresh_queues(self.device.as_ref())?;
        self.phase = Phase::Reset;
        self.driver_features = 0;
        (self.device_features_sel, self.driver_features_sel, self.queue_sel) = (0, 0, 0);
        Ok(())
    }
}

fn fresh_queues(device: &dyn Device) -> Result<Vec<Queue>, Error> {
    device
        .queue_sizes()
        .iter()
        .map(|size| {
            Queue::new(*size).map_err(|e| Error::Device { device: device.name(), why: e.to_string() })
        })
        .collect()
}

fn half(features: u64, selector: u32) -> u32 {
    match selector {
        0 => (features & 0xffff_ffff) as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

impl Registers for Transport {
    fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        data.fill(ABSENT);
        if let Some(start) = offset.checked_sub(register::CONFIG) {
            let state = self.state();
            let start = usize::try_from(start).unwrap_or(usize::MAX);
            let rest = state.device.config().get(start..).unwrap_or_default();
            for (slot, byte) in data.iter_mut().zip(rest) {
                *slot = *byte;
            }
        } else if let (Ok(word), true) = (<&mut [u8; 4]>::try_from(data), offset.is_multiple_of(4)) {
            *word = self.read_register(offset).to_le_bytes();
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        match <[u8; 4]>::try_from(data) {
            Ok(word) if offset.is_multiple_of(4) && offset < register::CONFIG => {
                self.write_register(offset, u32::from_le_bytes(word))
            }
            // No device of ours has writable configuration.
            _ => Ok(()),
        }
    }
}
