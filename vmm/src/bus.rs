//! Which device answers at which address. Built once, before the guest runs, and read-only from then on.

use std::sync::Arc;

/// A device's registers, as seen from a vCPU thread.
///
/// Any offset below the registered size and any width can arrive; a device answers what it does not know with
/// [`ABSENT`] and drops such writes. An error ends the machine.
pub trait Registers: Send + Sync {
    fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), crate::Error>;
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), crate::Error>;
}

/// What a read of nothing gives: all ones, as an undriven bus does.
pub const ABSENT: u8 = 0xff;

struct Range {
    base: u64,
    len: u64,
    device: Arc<dyn Registers>,
}

/// An address space: ports, or memory-mapped registers.
#[derive(Default)]
pub struct Bus {
    /// Sorted by base, without overlap.
    ranges: Vec<Range>,
}

impl Bus {
    /// # Panics
    /// When two ranges overlap: the layout is fixed at compile time, so that is a mistake in this crate.
    pub fn insert(&mut self, base: u64, len: u64, device: Arc<dyn Registers>) {
        let at = self.ranges.partition_point(|r| r.base < base);
        let clear_below = at == 0 || self.ranges[at - 1].base + self.ranges[at - 1].len <= base;
        let clear_above = self.ranges.get(at).is_none_or(|next| base + len <= next.base);
        assert!(clear_below && clear_above, "device ranges overlap at {base:#x}");
        self.ranges.insert(at, Range { base, len, device });
    }

    fn find(&self, address: u64) -> Option<(&dyn Registers, u64)> {
        let at = self.ranges.partition_point(|r| r.base <= address).checked_sub(1)?;
        let range = self.ranges.get(at)?;
        let offset = address.checked_sub(range.base).filter(|offset| *offset < range.len)?;
        Some((range.device.as_ref(), offset))
    }

    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), crate::Error> {
        match self.find(address) {
            Some((device, offset)) => device.read(offset, data),
            None => {
                data.fill(ABSENT);
                Ok(())
            }
        }
    }

    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), crate::Error> {
        self.find(address).map_or(Ok(()), |(device, offset)| device.write(offset, data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Echo(Mutex<Vec<u64>>);

    impl Registers for Echo {
        fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), crate::Error> {
            data.fill(offset as u8);
            Ok(())
        }
        fn write(&self, offset: u64, _: &[u8]) -> Result<(), crate::Error> {
            self.0.lock().unwrap().push(offset);
            Ok(())
        }
    }

    #[test]
    fn an_address_reaches_its_device_and_no_other_and_nothing_answers_with_ones() {
        let (low, high) = (Arc::new(Echo::default()), Arc::new(Echo::default()));
        let mut bus = Bus::default();
        bus.insert(0x2000, 0x1000, high.clone());
        bus.insert(0x1000, 0x1000, low.clone());
        for (address, expected) in [(0x0fff, 0xff), (0x1004, 4), (0x1fff, 0xff), (0x2008, 8), (0x3000, 0xff)]
        {
            let mut data = [0; 4];
            bus.read(address, &mut data).unwrap();
            assert_eq!(data, [expected; 4], "at {address:#x}");
            bus.write(address, &data).unwrap();
        }
        assert_eq!(*low.0.lock().unwrap(), [4, 0xfff]);
        assert_eq!(*high.0.lock().unwrap(), [8]);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_ranges_are_refused() {
        let mut bus = Bus::default();
        bus.insert(0x1000, 0x1000, Arc::new(Echo::default()));
        bus.insert(0x1800, 0x1000, Arc::new(Echo::default()));
    }
}
