//! The zero page and the command line.

use crate::{Error, layout, memory::Memory};
use linux_loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// `E820_TYPE_RAM` in arch/x86/include/asm/e820/types.h.
const E820_RAM: u32 = 1;
/// "HdrS", the boot protocol's signature.
const HEADER_MAGIC: u32 = 0x5372_6448;
/// `0xAA55` at the end of the first boot sector.
const BOOT_FLAG: u16 = 0xaa55;
/// Loader id for "undefined": this monitor has none assigned.
const LOADER_TYPE: u8 = 0xff;

/// What every guest boots with. Each word either takes away a probe for hardware that is not there, or says what to do
/// when the kernel gives up: reset at once through the keyboard controller's port, which ends the machine. `noreplace-smp`: on
/// one processor the kernel would patch every lock prefix away, for less than the patching costs. `swiotlb=noforce` keeps a
/// kernel that has memory above 4 GiB from setting 64 MiB of it aside for devices that cannot reach there: all of ours can.
const ALWAYS: &str = "reboot=k panic=-1 nomodule no_timer_check tsc=reliable noreplace-smp swiotlb=noforce root=/dev/vda \
                      rootfstype=erofs ro init=/.bivouac/agent";
const QUIET: &str = "quiet loglevel=0 8250.nr_uarts=0";
const CONSOLE: &str = "console=ttyS0 8250.nr_uarts=1 loglevel=7";

/// The whole command line. Virtio devices are announced on it, in the order of their bus slots: there is neither a PCI
/// bus nor ACPI to find them by.
pub fn command_line(virtio_devices: u32, console: bool, extra: &str) -> Result<String, Error> {
    let mut line = format!("{ALWAYS} {}", if console { CONSOLE } else { QUIET });
    for slot in 0..virtio_devices {
        let address = layout::VIRTIO_MMIO_BASE + u64::from(slot) * layout::VIRTIO_MMIO_SIZE;
        let irq = layout::VIRTIO_IRQ_BASE + slot;
        line.push_str(&format!(" virtio_mmio.device=4K@{address:#x}:{irq}"));
    }
    if !extra.is_empty() {
        line.push(' ');
        line.push_str(extra);
    }
    if line.len() >= layout::CMDLINE_MAX {
        return Err(Error::Config(format!(
            "the kernel command line has {} bytes, {} at most",
            line.len(),
            layout::CMDLINE_MAX - 1
        )));
    }
    if !line.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        return Err(Error::Config("the kernel command line must be printable ASCII".into()));
    }
    Ok(line)
}

/// Writes command line and zero page.
pub fn write(memory: &Memory, command_line: &str) -> Result<(), Error> {
    let failed = |e: vm_memory::GuestMemoryError| Error::Kernel(format!("boot parameters: {e}"));
    let mut line = command_line.as_bytes().to_vec();
    line.push(0);
    memory.write_slice(&line, GuestAddress(layout::CMDLINE)).map_err(failed)?;

    let mut params = boot_params::default();
    params.hdr.boot_flag = BOOT_FLAG;
    params.hdr.header = HEADER_MAGIC;
    params.hdr.type_of_loader = LOADER_TYPE;
    params.hdr.kernel_alignment = 0x100_0000;
    params.hdr.cmd_line_ptr = layout::CMDLINE as u32;
    params.hdr.cmdline_size = line.len() as u32;
    let map = e820(memory);
    params.e820_entries = map.len() as u8;
    for (entry, (addr, size)) in params.e820_table.iter_mut().zip(map) {
        *entry = boot_e820_entry { addr, size, r#type: E820_RAM };
    }
    memory.write_obj(params, GuestAddress(layout::ZERO_PAGE)).map_err(failed)
}

/// The memory the kernel may use: all of it but the legacy hole below 1 MiB, where the MP table stands.
fn e820(memory: &Memory) -> Vec<(u64, u64)> {
    let mut map = vec![(0, layout::MPTABLE)];
    for region in memory.iter() {
        let start = region.start_addr().0.max(layout::HIGH_MEMORY);
        let end = region.start_addr().0 + region.len();
        if end > start {
            map.push((start, end - start));
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_names_every_device_and_stays_within_its_limit() {
        let line = command_line(3, false, "bivouac.port=7").unwrap();
        for device in ["4K@0xd0000000:5", "4K@0xd0001000:6", "4K@0xd0002000:7"] {
            assert!(line.contains(device), "{line}");
        }
        assert!(line.ends_with(" bivouac.port=7"));
        assert!(command_line(1, false, &"x".repeat(layout::CMDLINE_MAX)).is_err());
        assert!(command_line(1, false, "new\nline").is_err());
    }

    #[test]
    fn the_memory_map_leaves_out_the_legacy_hole_and_the_device_gap() {
        let memory = crate::memory::allocate(4096).unwrap();
        assert_eq!(
            e820(&memory),
            vec![
                (0, layout::MPTABLE),
                (layout::HIGH_MEMORY, layout::MMIO_GAP_START - layout::HIGH_MEMORY),
                (layout::MMIO_GAP_END, 1 << 30)
            ]
        );
    }
}
