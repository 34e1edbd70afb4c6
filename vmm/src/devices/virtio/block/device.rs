//! Configuration space and activation.

use super::{DEVICE_ID, QUEUE_SIZE, SECTOR, SEGMENTS_MAX, feature};
use crate::{
    Error,
    devices::virtio::{Activation, Device, feature::RING, runner::Handle},
};
use virtio_queue::Queue;

pub struct Block {
    handle: Handle,
    features: u64,
    config: Vec<u8>,
}

impl Block {
    pub fn new(handle: Handle, bytes: u64, read_only: bool) -> Self {
        // struct virtio_blk_config, as far as the features offered go: capacity, size_max, seg_max.
        let mut config = bytes.checked_div(SECTOR).unwrap_or(0).to_le_bytes().to_vec();
        config.extend_from_slice(&0_u32.to_le_bytes());
        config.extend_from_slice(&SEGMENTS_MAX.to_le_bytes());
        config.resize(60, 0);
        let access = if read_only { feature::RO } else { feature::FLUSH };
        Self { handle, features: RING | feature::SEG_MAX | access, config }
    }
}

impl Device for Block {
    fn name(&self) -> &'static str {
        "block"
    }

    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        self.handle.activate(activation)
    }

    fn sleep(&mut self) -> Result<Vec<Queue>, Error> {
        self.handle.sleep()
    }
}
