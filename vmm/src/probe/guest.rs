//! Guests of a few bytes: 64-bit long mode from the first instruction, one page of code, one of data, and a port to say
//! how it went.

use crate::Error;
use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use std::{
    fmt,
    os::unix::thread::JoinHandleExt,
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress,
};

const MEMORY: usize = 0x20_0000;
const GDT: u64 = 0x500;
const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const IDT: u64 = 0x4000;
const STACK: u64 = 0x7000;
const CODE: u64 = 0x8000;
const DATA: u64 = 0x9000;
const INT3_HANDLER: u64 = 0xa000;
const SYSCALL_HANDLER: u64 = 0xb000;

const PORT: u16 = 0x10;
pub const INT3_ARRIVED: u8 = 0x33;
/// Fills the data page before `xsave`, which writes the floating-point control word over its start.
pub const POISON: u64 = u64::MAX;

const KERNEL_CODE: u16 = 0x08;
const KERNEL_DATA: u16 = 0x10;
const USER_DATA: u16 = 0x23;
const USER_CODE: u16 = 0x2b;

const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;

/// A probe that hangs is as good as one that fails. This much processor time, so that a host that is busy with other
/// things is not taken for one that cannot: what works takes a few milliseconds even under emulation.
const PATIENCE: Duration = Duration::from_millis(250);
/// A guest that waits for something uses no processor time, and is not waited for longer than this.
const WALL_PATIENCE: Duration = Duration::from_secs(5);
/// How often a probe that is under way is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// `out PORT, al; hlt`
const REPORT: [u8; 3] = [0xe6, PORT as u8, 0xf4];

pub struct Guest {
    memory: GuestMemoryMmap<()>,
    user: bool,
    registers: kvm_regs,
}

/// How a guest ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It wrote this byte to the port.
    Port(u8),
    NotEmulated,
    TripleFault,
    Hung,
    Other(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port(byte) => write!(f, "it reported {byte:#x}"),
            Self::NotEmulated => f.write_str("KVM gave up emulating it"),
            Self::TripleFault => f.write_str("it ended in a triple fault"),
            Self::Hung => write!(f, "no result within {} ms of processor time", PATIENCE.as_millis()),
            Self::Other(what) => f.write_str(what),
        }
    }
}

/// From ring 3 into ring 0, which reports its code segment: the lowest two bits are the ring.
pub fn syscall() -> Guest {
    let mut guest = Guest::new(&[0x0f, 0x05]);
    guest.user = true;
    // mov eax, cs
    guest.put(SYSCALL_HANDLER, &[&[0x8c, 0xc8][..], &REPORT].concat());
    guest
}

pub fn cmpxchg16b() -> Guest {
    let mut guest = Guest::new(&[&[0x48, 0x0f, 0xc7, 0x0f][..], &REPORT].concat());
    (guest.registers.rbx, guest.registers.rcx) = (1, 2);
    guest
}

pub fn xsave() -> Guest {
    let mut guest = Guest::new(&[&[0x0f, 0xae, 0x27][..], &REPORT].concat());
    (guest.registers.rax, guest.registers.rdx) = (1, 0);
    guest.put(DATA, &POISON.to_le_bytes());
    guest
}

/// popcnt rax, rbx
pub fn popcnt() -> Guest {
    let mut guest = Guest::new(&[&[0xf3, 0x48, 0x0f, 0xb8, 0xc3][..], &REPORT].concat());
    guest.registers.rbx = 0xff;
    guest
}

pub fn int3() -> Guest {
    let guest = Guest::new(&[0xcc]);
    // mov al, INT3_ARRIVED
    guest.put(INT3_HANDLER, &[&[0xb0, INT3_ARRIVED][..], &REPORT].concat());
    guest
}

/// dec rcx; jnz
pub fn count_down(rounds: u64) -> Guest {
    let mut guest = Guest::new(&[&[0x48, 0xff, 0xc9, 0x75, 0xfb][..], &REPORT].concat());
    guest.registers.rcx = rounds;
    guest
}

impl Guest {
    fn new(code: &[u8]) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]);
        let Ok(memory) = memory else { unreachable!("two MiB of address space") };
        let registers = kvm_regs { rip: CODE, rsp: STACK, rdi: DATA, rflags: 2, ..Default::default() };
        let guest = Self { memory, user: false, registers };
        guest.put(CODE, code);
        // One 2 MiB page that ring 3 may use too: present, writable, user; and large, in the last level.
        for (table, entry) in [(PML4, PDPT | 7), (PDPT, PD | 7), (PD, 0x80 | 7)] {
            guest.put(table, &u64::to_le_bytes(entry));
        }
        let descriptors: [u64; 6] = [
            0,
            0x00af_9b00_0000_ffff,
            0x00cf_9300_0000_ffff,
            0,
            0x00cf_f300_0000_ffff,
            0x00af_fb00_0000_ffff,
        ];
        for (address, descriptor) in (GDT..).step_by(8).zip(descriptors) {
            guest.put(address, &descriptor.to_le_bytes());
        }
        // Vector 3: a present 64-bit interrupt gate.
        let gate = (INT3_HANDLER & 0xffff) | (u64::from(KERNEL_CODE) << 16) | (0x8e << 40);
        guest.put(IDT + 3 * 16, &gate.to_le_bytes());
        guest
    }

    fn put(&self, address: u64, bytes: &[u8]) {
        let written = self.memory.write_slice(bytes, GuestAddress(address));
        debug_assert!(written.is_ok(), "constants of this file lie in its memory");
    }

    /// Eight bytes of the data page.
    pub fn data(&self, offset: u64) -> u64 {
        self.memory.read_obj(GuestAddress(DATA + offset)).map_or(0, u64::from_le)
    }

    /// Runs it to its end, and says how much processor time that took.
    pub fn run(self, kvm: &Kvm) -> Result<(Self, Outcome, Duration), Error> {
        let vm = kvm.create_vm().map_err(Error::kvm("create a virtual machine"))?;
        if let Some(region) = self.memory.iter().next() {
            let host =
                region.get_host_address(MemoryRegionAddress(0)).map_err(|e| Error::Memory(e.to_string()))?;
            let description = kvm_userspace_memory_region {
                memory_size: MEMORY as u64,
                userspace_addr: host as u64,
                ..Default::default()
            };
            // SAFETY: one live mapping of that size, which outlives the VM: both are this function's.
            unsafe { vm.set_user_memory_region(description) }
                .map_err(Error::kvm("register guest memory with KVM"))?;
        }
        let vcpu = vm.create_vcpu(0).map_err(Error::kvm("create a virtual processor"))?;
        self.set_up(kvm, &vcpu).map_err(Error::kvm("set a virtual processor's registers"))?;
        let (outcome, took) = run_with_patience(vcpu)?;
        Ok((self, outcome, took))
    }

    fn set_up(&self, kvm: &Kvm, vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
        vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
        let mut special = vcpu.get_sregs()?;
        let segment = |selector: u16, type_: u8, long: u8| kvm_segment {
            selector,
            type_,
            limit: 0xffff_ffff,
            present: 1,
            s: 1,
            g: 1,
            l: long,
            db: 1 - long,
            dpl: (selector & 3) as u8,
            ..Default::default()
        };
        let (code, data) = if self.user { (USER_CODE, USER_DATA) } else { (KERNEL_CODE, KERNEL_DATA) };
        special.cs = segment(code, 0xb, 1);
        let data = segment(data, 0x3, 0);
        (special.ds, special.es, special.ss, special.fs, special.gs) = (data, data, data, data, data);
        special.gdt.base = GDT;
        special.gdt.limit = 47;
        special.idt.base = IDT;
        special.idt.limit = 0xfff;
        special.cr3 = PML4;
        // PAE, and SSE and XSAVE switched on.
        special.cr4 = (1 << 5) | (1 << 9) | (1 << 10) | (1 << 18);
        // PE, ET, PG.
        special.cr0 = 1 | (1 << 4) | (1 << 31);
        // SYSCALL, long mode enabled and active.
        special.efer = 1 | (1 << 8) | (1 << 10);
        vcpu.set_sregs(&special)?;
        vcpu.set_regs(&self.registers)?;
        let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
        let star = (u64::from(KERNEL_CODE) << 32) | (u64::from(KERNEL_DATA) << 48);
        if let Ok(msrs) = Msrs::from_entries(&[msr(MSR_STAR, star), msr(MSR_LSTAR, SYSCALL_HANDLER)]) {
            vcpu.set_msrs(&msrs)?;
        }
        Ok(())
    }
}

/// On a thread of its own, so that a guest that never ends can be brought out by a signal.
fn run_with_patience(mut vcpu: VcpuFd) -> Result<(Outcome, Duration), Error> {
    let signal = libc::SIGRTMIN();
    ignore_by_handler(signal);
    let (report, result) = channel();
    let thread = thread::spawn(move || {
        let started = thread_time(libc::CLOCK_THREAD_CPUTIME_ID);
        let outcome = match vcpu.run() {
            Ok(VcpuExit::IoOut(PORT, &[byte])) => Outcome::Port(byte),
            Ok(VcpuExit::InternalError) => Outcome::NotEmulated,
            Ok(VcpuExit::Shutdown) => Outcome::TripleFault,
            Ok(other) => Outcome::Other(format!("unexpected exit {other:?}")),
            Err(e) if e.errno() == libc::EINTR => Outcome::Hung,
            Err(e) => Outcome::Other(format!("KVM_RUN: {e}")),
        };
        // Nobody waits any more only if patience ran out.
        let _ = report.send((outcome, thread_time(libc::CLOCK_THREAD_CPUTIME_ID).saturating_sub(started)));
    });
    let started = Instant::now();
    let outcome = loop {
        match result.recv_timeout(LOOK) {
            Err(RecvTimeoutError::Timeout) => {}
            other => break other,
        }
        if used(&thread) > PATIENCE || started.elapsed() > WALL_PATIENCE {
            // The signal may arrive a moment before the thread enters the guest, so it is sent until it is heard.
            // SAFETY: the thread has not been joined, so its handle is valid.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), signal) };
        }
    };
    let _ = thread.join();
    outcome.map_err(|_| Error::Vcpu { vcpu: 0, why: "its thread ended early".into() })
}

/// Processor time that a thread has used, in the guest too.
fn used(thread: &thread::JoinHandle<()>) -> Duration {
    let mut clock = 0;
    // SAFETY: the thread has not been joined, so its handle is valid; the clock is filled in when the call succeeds.
    if unsafe { libc::pthread_getcpuclockid(thread.as_pthread_t(), &raw mut clock) } != 0 {
        return Duration::ZERO;
    }
    thread_time(clock)
}

fn thread_time(clock: libc::clockid_t) -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call. A clock that is gone leaves it at zero.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// A handler that does nothing: its only effect is that a blocked KVM_RUN returns.
fn ignore_by_handler(signal: libc::c_int) {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: all zeroes is a valid `sigaction`; the handler does nothing at all.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}
