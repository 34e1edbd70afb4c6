//! Frames between the rings and a [`Frames`]: pure over guest memory, one pass at a time, each of bounded length.
//!
//! A chain leaves its ring only together with its frame. Where the other side is not ready the ring is put back as it
//! was, so that between two passes nothing is in flight.

use super::{BUDGET, FRAME_MAX, FRAMING, HEADER_LEN, SEGMENTS_MAX, feature};
use crate::{
    Error,
    devices::virtio::chain::{self, Outside, Segment, Vectors},
    memory::Memory,
};
use std::io;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

/// `flags` of a header: the checksum is to be filled in.
const NEEDS_CSUM: u8 = 1;
/// `gso_type` of a header: cut it into TCP segments over IPv4, over IPv6.
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;

/// Where frames come from and go to. Each is one call with header and frame in `vectors`, and neither call waits.
pub trait Frames: Send {
    /// Takes one frame, and says how many bytes it has with its header; `None` when there is none now.
    fn receive(&mut self, vectors: &[libc::iovec]) -> io::Result<Option<usize>>;
    /// Gives one frame; [`io::ErrorKind::WouldBlock`] when there is no room for it now.
    fn send(&mut self, vectors: &[libc::iovec]) -> io::Result<()>;
}

/// Why a pass stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// The driver has offered nothing more, and will say when it has.
    RingEmpty,
    /// The other side has no frame, or no room for one.
    NotReady,
    /// There may be more, and it is somebody else's turn.
    BudgetSpent,
}

/// What came of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// The driver wants to hear of it.
    pub interrupt: bool,
    pub pause: Pause,
}

/// What came of one chain.
enum Moved {
    /// This many bytes were written to it.
    Done(u32),
    /// The frame was lost; the chain is as good for the next.
    Lost,
    NotReady,
}

pub struct NetWorker<F> {
    pub(super) frames: F,
    mtu: u16,
    /// Negotiated.
    features: u64,
    header: [u8; HEADER_LEN],
    /// What comes behind the room for a frame: a tap cuts a frame that is too large, without a word.
    excess: [u8; 1],
    segments: Vec<Segment>,
    vectors: Vectors,
}

fn broken(why: &str) -> Error {
    Error::Guest { device: "net", why: why.to_owned() }
}

fn outside(_: Outside) -> Error {
    broken("a buffer lies outside memory")
}

impl<F: Frames> NetWorker<F> {
    pub fn new(frames: F, mtu: u16) -> Self {
        Self {
            frames,
            mtu,
            features: 0,
            header: [0; HEADER_LEN],
            excess: [0],
            segments: Vec::with_capacity(SEGMENTS_MAX),
            vectors: Vectors::default(),
        }
    }

    /// A driver is there, and has negotiated `features`.
    pub fn negotiated(&mut self, features: u64) {
        self.features = features;
    }

    /// Bytes that every receive buffer has to have room for, header included.
    fn room(&self) -> usize {
        // A driver that was not told of an MTU goes by Ethernet's.
        let mtu = if self.features & feature::MTU != 0 { self.mtu.max(1500) } else { 1500 };
        let frame = if self.features & (feature::GUEST_TSO4 | feature::GUEST_TSO6) != 0 {
            FRAME_MAX
        } else {
            usize::from(mtu).saturating_add(FRAMING).min(FRAME_MAX)
        };
        frame.saturating_add(HEADER_LEN)
    }

    /// Moves frames from the outside to the receive ring.
    pub fn receive(&mut self, queue: &mut Queue, memory: &Memory) -> Result<Pass, Error> {
        self.pass(queue, memory, Self::receive_one)
    }

    /// Moves frames from the transmit ring to the outside.
    pub fn transmit(&mut self, queue: &mut Queue, memory: &Memory) -> Result<Pass, Error> {
        self.pass(queue, memory, Self::transmit_one)
    }

    /// Serves the ring chain by chain. The driver is asked to notify only where the ring ran empty: at every other
    /// pause something else has to happen first.
    fn pass(
        &mut self,
        queue: &mut Queue,
        memory: &Memory,
        serve: fn(&mut Self, &Memory) -> Result<Moved, Error>,
    ) -> Result<Pass, Error> {
        let ring = |why: virtio_queue::Error| broken(&why.to_string());
        let mut used_any = false;
        queue.disable_notification(memory).map_err(ring)?;
        let mut left = BUDGET;
        let pause = loop {
            if left == 0 {
                break Pause::BudgetSpent;
            }
            let before = queue.next_avail();
            let Some(chain) = queue.iter(memory).map_err(ring)?.next() else {
                if !queue.enable_notification(memory).map_err(ring)? {
                    break Pause::RingEmpty;
                }
                // More was offered after the look at the ring; or an entry that cannot even be looked at.
                if queue.iter(memory).map_err(ring)?.next().is_none() {
                    return Err(broken("a ring entry names no descriptor"));
                }
                queue.set_next_avail(before);
                queue.disable_notification(memory).map_err(ring)?;
                left = left.saturating_sub(1);
                continue;
            };
            let head = chain.head_index();
            chain::gather(chain, SEGMENTS_MAX, &mut self.segments).map_err(broken)?;
            match serve(self, memory)? {
                Moved::Done(written) => {
                    queue.add_used(memory, head, written).map_err(ring)?;
                    used_any = true;
                }
                Moved::Lost => queue.set_next_avail(before),
                Moved::NotReady => {
                    queue.set_next_avail(before);
                    break Pause::NotReady;
                }
            }
            left = left.saturating_sub(1);
        };
        self.vectors.clear();
        let interrupt = used_any && queue.needs_notification(memory).map_err(ring)?;
        Ok(Pass { interrupt, pause })
    }

    fn receive_one(&mut self, memory: &Memory) -> Result<Moved, Error> {
        if self.segments.iter().any(|segment| !segment.writable) {
            return Err(broken("a receive buffer cannot be written"));
        }
        let room = self.room();
        if chain::total(&self.segments) < room as u64 {
            return Err(broken("a receive buffer has no room for a frame"));
        }
        self.aim(memory, room)?;
        self.vectors.push_own(&mut self.excess);
        let failed = Error::io("take a frame from the tap");
        let Some(len) = self.frames.receive(self.vectors.as_slice()).map_err(failed)? else {
            return Ok(Moved::NotReady);
        };
        if len == room.saturating_add(self.excess.len()) {
            return Ok(Moved::Lost);
        }
        if !(HEADER_LEN..=room).contains(&len) {
            return Err(Error::Device { device: "net", why: format!("the tap gave a frame of {len} bytes") });
        }
        // One buffer holds all of it (section 5.1.6.4.1); the kernel leaves this field to us.
        if let Some(count) = self.header.last_chunk_mut() {
            *count = 1_u16.to_le_bytes();
        }
        let mut rest: &[u8] = &self.header;
        for (address, len) in header_parts(&self.segments) {
            let (part, after) = rest.split_at_checked(len).unwrap_or((rest, &[]));
            memory.write_slice(part, address).map_err(|_| outside(Outside))?;
            rest = after;
        }
        Ok(Moved::Done(u32::try_from(len).unwrap_or(u32::MAX)))
    }

    fn transmit_one(&mut self, memory: &Memory) -> Result<Moved, Error> {
        if self.segments.iter().any(|segment| segment.writable) {
            return Err(broken("a frame to send is not readable"));
        }
        let total = chain::total(&self.segments);
        if total < HEADER_LEN as u64 {
            return Err(broken("a frame to send lacks its header"));
        }
        if total > (HEADER_LEN as u64).saturating_add(FRAME_MAX as u64) {
            return Err(broken("a frame to send is above 65550 bytes"));
        }
        let mut rest: &mut [u8] = &mut self.header;
        for (address, len) in header_parts(&self.segments) {
            let (part, after) = std::mem::take(&mut rest).split_at_mut_checked(len).unwrap_or_default();
            memory.read_slice(part, address).map_err(|_| outside(Outside))?;
            rest = after;
        }
        self.check_header()?;
        self.aim(memory, usize::MAX)?;
        match self.frames.send(self.vectors.as_slice()) {
            Ok(()) => Ok(Moved::Done(0)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Moved::NotReady),
            Err(e) if lost(&e) => Ok(Moved::Done(0)),
            Err(e) => Err(Error::io("send a frame to the tap")(e)),
        }
    }

    /// The header asks for nothing that was not negotiated (section 5.1.6.2).
    fn check_header(&self) -> Result<(), Error> {
        let [flags, gso_type, ..] = self.header;
        let has = |bit: u64| self.features & bit != 0;
        let flags_known = flags == 0 || (flags == NEEDS_CSUM && has(feature::CSUM));
        let gso_known = match gso_type {
            GSO_NONE => true,
            GSO_TCPV4 => has(feature::HOST_TSO4),
            GSO_TCPV6 => has(feature::HOST_TSO6),
            _ => false,
        };
        if flags_known && gso_known {
            Ok(())
        } else {
            Err(broken("a frame asks for an offload that was not negotiated"))
        }
    }

    /// Points the vectors at our copy of the header, then at the first `limit` bytes of the chain without its own.
    fn aim(&mut self, memory: &Memory, limit: usize) -> Result<(), Error> {
        self.vectors.clear();
        self.vectors.push_own(&mut self.header);
        let mut skip = HEADER_LEN;
        let mut left = limit.saturating_sub(HEADER_LEN);
        for segment in &self.segments {
            let whole = segment.len as usize;
            let skipped = skip.min(whole);
            skip = skip.saturating_sub(skipped);
            let len = whole.saturating_sub(skipped).min(left);
            left = left.saturating_sub(len);
            if len > 0 {
                let address = segment.address.0.checked_add(skipped as u64).ok_or(Outside);
                let address = address.map(GuestAddress).map_err(outside)?;
                self.vectors.push_guest(memory, address, len).map_err(outside)?;
            }
        }
        Ok(())
    }
}

/// Where the header of a chain lies: it may be spread over segments in any way.
fn header_parts(segments: &[Segment]) -> impl Iterator<Item = (GuestAddress, usize)> {
    let mut left = HEADER_LEN;
    segments.iter().map_while(move |segment| {
        let len = left.min(segment.len as usize);
        let wanted = left > 0;
        left = left.saturating_sub(len);
        wanted.then_some((segment.address, len))
    })
}

/// What a network does with a frame that it cannot carry: the kernel refused it (`EINVAL`), the interface is down (`EIO`),
/// or there is no memory for it. Sending it again would not help, and the guest's protocols know about loss.
fn lost(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EINVAL | libc::EIO | libc::ENOBUFS | libc::ENOMEM | libc::EMSGSIZE | libc::ENETDOWN)
    )
}
