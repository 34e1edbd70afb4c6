//! Configuration space, the features that the tap can keep, and activation.

use super::{DEVICE_ID, MTU, QUEUE_SIZES, feature, tap::Tap};
use crate::{
    Error,
    devices::virtio::{Activation, Device, feature::RING, runner::Handle},
};
use bivouac_protocol::monitor::Network;
use virtio_queue::Queue;

pub struct Net {
    handle: Handle,
    /// For its offloads; frames are the worker's.
    tap: Tap,
    features: u64,
    config: [u8; 12],
}

impl Net {
    pub fn new(handle: Handle, tap: Tap, network: &Network) -> Result<Self, Error> {
        check(network)?;
        let features = RING | feature::MAC | feature::MTU | tap.features();
        Ok(Self { handle, tap, features, config: config(network) })
    }
}

/// `struct virtio_net_config` (section 5.1.4): address, status, number of queue pairs, MTU. The two in the middle belong to
/// features that are not offered.
pub(super) fn config(network: &Network) -> [u8; 12] {
    let [a, b, c, d, e, f] = network.mac;
    let [low, high] = network.mtu.to_le_bytes();
    [a, b, c, d, e, f, 0, 0, 0, 0, low, high]
}

pub(super) fn check(network: &Network) -> Result<(), Error> {
    let multicast = network.mac.first().is_some_and(|byte| byte & 1 != 0);
    if multicast || network.mac == [0; 6] {
        return Err(Error::Config(format!("{:02x?} is no address of a network card", network.mac)));
    }
    if !MTU.contains(&network.mtu) {
        let (least, most) = (MTU.start(), MTU.end());
        return Err(Error::Config(format!("mtu is {}, {least} to {most} are possible", network.mtu)));
    }
    Ok(())
}

impl Device for Net {
    fn name(&self) -> &'static str {
        "net"
    }

    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        self.tap.offload(activation.features)?;
        self.handle.activate(activation)
    }

    fn sleep(&mut self) -> Result<Vec<Queue>, Error> {
        self.handle.sleep()
    }
}
