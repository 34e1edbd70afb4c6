//! A device that checks what it is given, and counts.

use bivouac_vmm::{
    Error,
    devices::virtio::{Activation, Device, feature},
};
use std::sync::{Arc, Mutex};
use virtio_queue::{Queue, QueueT};

/// What it offers.
pub const OFFERED: u64 = feature::RING | 0b1010_0101;

/// How often it was given its queues, and how often they were taken from it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    pub activations: u32,
    pub sleeps: u32,
}

impl Told {
    /// Whether it has its queues.
    pub fn holds(&self) -> bool {
        self.activations > self.sleeps
    }
}

pub struct Spy {
    told: Arc<Mutex<Told>>,
    sizes: &'static [u16],
    queues: Vec<Queue>,
}

impl Spy {
    /// `sizes`: the largest that each of its queues may be.
    pub fn new(sizes: &'static [u16]) -> (Self, Arc<Mutex<Told>>) {
        let told = Arc::<Mutex<Told>>::default();
        (Self { told: told.clone(), sizes, queues: Vec::new() }, told)
    }
}

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
        self.sizes
    }

    fn config(&self) -> &[u8] {
        b"configuration"
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        assert_eq!(activation.features & !OFFERED, 0);
        assert_ne!(activation.features & feature::VERSION_1, 0);
        assert_eq!(activation.queues.len(), self.sizes.len());
        for (queue, most) in activation.queues.iter().zip(self.sizes) {
            assert!(queue.size().is_power_of_two() && queue.size() <= *most && queue.max_size() == *most);
            assert!(queue.is_valid(&activation.memory));
            assert_eq!(queue.event_idx_enabled(), activation.features & feature::EVENT_IDX != 0);
        }
        let mut told = self.told.lock().unwrap();
        assert!(!told.holds(), "given queues twice");
        told.activations += 1;
        self.queues = activation.queues;
        Ok(())
    }

    fn sleep(&mut self) -> Result<Vec<Queue>, Error> {
        let mut told = self.told.lock().unwrap();
        assert!(told.holds(), "asked for queues it does not have");
        told.sleeps += 1;
        Ok(std::mem::take(&mut self.queues))
    }
}
