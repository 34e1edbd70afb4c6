//! A transport as it is saved. Whatever a state claims is checked when it is taken up: it may come from a file that was
//! damaged or made up.

use super::Phase;
use crate::{
    Error,
    devices::virtio::feature::{EVENT_IDX, VERSION_1},
    memory::Memory,
};
use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT};

/// Registers and queues of one device. [`Default`] is a device that no driver has touched.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    pub(super) phase: Phase,
    /// The device had its queues when it went to sleep.
    pub(super) active: bool,
    pub(super) interrupt_status: u32,
    pub(super) device_features_sel: u32,
    pub(super) driver_features: u64,
    pub(super) driver_features_sel: u32,
    pub(super) queue_sel: u32,
    pub(super) queues: Vec<SavedQueue>,
}

/// [`QueueState`], as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedQueue {
    max_size: u16,
    next_avail: u16,
    next_used: u16,
    event_idx_enabled: bool,
    size: u16,
    ready: bool,
    desc_table: u64,
    avail_ring: u64,
    used_ring: u64,
}

impl From<&Queue> for SavedQueue {
    fn from(queue: &Queue) -> Self {
        let QueueState {
            max_size,
            next_avail,
            next_used,
            event_idx_enabled,
            size,
            ready,
            desc_table,
            avail_ring,
            used_ring,
        } = queue.state();
        Self {
            max_size,
            next_avail,
            next_used,
            event_idx_enabled,
            size,
            ready,
            desc_table,
            avail_ring,
            used_ring,
        }
    }
}

impl SavedQueue {
    fn take_up(self) -> Result<Queue, virtio_queue::Error> {
        Queue::try_from(QueueState {
            max_size: self.max_size,
            next_avail: self.next_avail,
            next_used: self.next_used,
            event_idx_enabled: self.event_idx_enabled,
            size: self.size,
            ready: self.ready,
            desc_table: self.desc_table,
            avail_ring: self.avail_ring,
            used_ring: self.used_ring,
        })
    }
}

/// The queues of a state, if they are the device's: as many, as large, and with features it offers.
pub(super) fn check(
    state: &TransportState,
    device: &dyn super::Device,
    memory: &Memory,
) -> Result<Vec<Queue>, Error> {
    let refuse = |why: &str| Error::Snapshot(format!("{} device: {why}", device.name()));
    let sizes = device.queue_sizes();
    if state.queues.len() != sizes.len()
        || state.queues.iter().zip(sizes).any(|(queue, most)| queue.max_size != *most)
    {
        return Err(refuse("its queues are not this device's"));
    }
    if matches!(state.phase, Phase::FeaturesOk | Phase::Live) || state.active {
        if state.driver_features & !device.features() != 0 {
            return Err(refuse("it was negotiated with features that this host does not have"));
        }
        if state.driver_features & VERSION_1 == 0 {
            return Err(refuse("it was negotiated without the feature that every driver has to take"));
        }
    }
    match (state.phase, state.active) {
        // A driver that gave up may have done so before or after.
        (Phase::Live, true) | (Phase::Failed, _) => {}
        (Phase::Live, false) => return Err(refuse("its driver is ready and it has no queues")),
        (_, true) => return Err(refuse("it has its queues and its driver is not ready")),
        (_, false) => {}
    }
    let queues = state
        .queues
        .iter()
        .map(|queue| queue.take_up().map_err(|e| refuse(&e.to_string())))
        .collect::<Result<Vec<_>, _>>()?;
    if state.active && queues.iter().any(|queue| !queue.is_valid(memory)) {
        return Err(refuse("a queue does not lie in guest memory"));
    }
    let event_idx = state.driver_features & EVENT_IDX != 0;
    if state.active && queues.iter().any(|queue| queue.event_idx_enabled() != event_idx) {
        return Err(refuse("a queue does not go by the features that were negotiated"));
    }
    Ok(queues)
}
