//! The event queue: how a guest learns that it is another machine than it was.

use super::DEVICE;
use crate::{Error, memory::Memory};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::Bytes;

/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (section 5.10.6.7): every connection is dead, and the context id is to be read
/// again. Listeners live on.
const TRANSPORT_RESET: u32 = 0;

/// Puts the event in the first buffer the driver has left for one. A driver that left none is told nothing, and keeps
/// the address it had: its connections then fail one by one.
pub fn reset_transport(queue: &mut Queue, memory: &Memory) -> Result<bool, Error> {
    let broken = |why: String| Error::Guest { device: DEVICE, why };
    let Some(mut chain) = queue.iter(memory).map_err(|e| broken(e.to_string()))?.next() else {
        return Ok(false);
    };
    let head = chain.head_index();
    let buffer = chain.next().filter(|buffer| buffer.is_write_only() && buffer.len() >= 4);
    let Some(buffer) = buffer else {
        return Err(broken("a buffer for events has no room for one".into()));
    };
    memory
        .write_obj(TRANSPORT_RESET.to_le(), buffer.addr())
        .map_err(|_| broken("a buffer for events lies outside memory".into()))?;
    queue.add_used(memory, head, 4).map_err(|e| broken(e.to_string()))?;
    Ok(true)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use virtio_queue::{desc::RawDescriptor, desc::split::Descriptor, mock::MockSplitQueue};
    use vm_memory::GuestAddress;

    const WRITE: u16 = 2;

    fn memory() -> Memory {
        Memory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
    }

    fn told(address: u64, len: u32, flags: u16) -> Result<(bool, u16, u32), Error> {
        let memory = memory();
        memory.write_obj(0xffff_ffff_u32, GuestAddress(0x8000)).unwrap();
        let mock = MockSplitQueue::new(&memory, 16);
        mock.add_desc_chains(&[RawDescriptor::from(Descriptor::new(address, len, flags, 0))], 0).unwrap();
        let mut queue: Queue = mock.create_queue().unwrap();
        let sent = reset_transport(&mut queue, &memory)?;
        Ok((sent, u16::from_le(mock.used().idx().load()), memory.read_obj(GuestAddress(0x8000)).unwrap()))
    }

    #[test]
    fn the_guest_finds_one_reset_in_its_first_buffer() {
        assert_eq!(told(0x8000, 8, WRITE).unwrap(), (true, 1, TRANSPORT_RESET));
    }

    #[test]
    fn a_buffer_that_cannot_hold_an_event_ends_the_machine() {
        for (address, len, flags) in [(0x8000, 8, 0), (0x8000, 3, WRITE), (1 << 30, 8, WRITE)] {
            assert!(
                matches!(told(address, len, flags), Err(Error::Guest { .. })),
                "{address:#x} {len} {flags}"
            );
        }
    }

    #[test]
    fn a_driver_without_buffers_is_told_nothing() {
        let memory = memory();
        let mock = MockSplitQueue::new(&memory, 16);
        let mut queue: Queue = mock.create_queue().unwrap();
        assert!(!reset_transport(&mut queue, &memory).unwrap());
    }
}
