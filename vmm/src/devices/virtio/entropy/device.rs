//! No configuration space, one queue.

use super::{DEVICE_ID, QUEUE_SIZE};
use crate::{
    Error,
    devices::virtio::{Activation, Device, feature::RING, runner::Handle},
};
use virtio_queue::Queue;

pub struct Entropy {
    handle: Handle,
}

impl Entropy {
    pub fn new(handle: Handle) -> Self {
        Self { handle }
    }
}

impl Device for Entropy {
    fn name(&self) -> &'static str {
        "entropy"
    }

    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        RING
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn config(&self) -> &[u8] {
        &[]
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        self.handle.activate(activation)
    }

    fn sleep(&mut self) -> Result<Vec<Queue>, Error> {
        self.handle.sleep()
    }
}
