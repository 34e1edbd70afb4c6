//! Daemon and monitor: one postcard message per `SOCK_SEQPACKET` packet.
//!
//! The daemon makes a *listening* socket in the sandbox's own directory, starts the monitor with it as descriptor
//! [`fd::CONTROL`], and connects. A daemon that restarts finds the socket and connects again: the monitor serves one
//! connection at a time and lives on without any. The first message on the first connection is
//! [`ToMonitor::Boot`]; a monitor whose first connection ends before that exits.

use serde::{Deserialize, Serialize};

/// Version of everything in this module; part of [`ToMonitor::Boot`] and [`ToMonitor::Restore`].
pub const VERSION: u16 = 2;

/// Largest message, in bytes.
pub const MAX_MESSAGE: usize = 64 << 10;

/// The descriptors a monitor inherits. It opens nothing by path: inside its jail there are no paths.
pub mod fd {
    /// Listening `SOCK_SEQPACKET` socket.
    pub const CONTROL: i32 = 3;
    /// Uncompressed guest kernel (ELF), read-only.
    pub const KERNEL: i32 = 4;
    /// The template's root image (EROFS), read-only.
    pub const ROOT: i32 = 5;
    /// The sandbox's own disk (ext4), read-write.
    pub const SCRATCH: i32 = 6;
    /// `cgroup.procs` of the sandbox's cgroup, write-only: the monitor joins once its VM descriptor exists, since
    /// `KVM_CREATE_VM` inside a cgroup can cost tens of milliseconds.
    pub const CGROUP: i32 = 7;
    /// The sandbox's lock file, held under an exclusive `flock` for as long as the monitor lives.
    pub const LOCK: i32 = 8;
    /// `/dev/kvm`.
    pub const KVM: i32 = 9;
    /// `/dev/vhost-vsock`.
    pub const VSOCK: i32 = 10;
    /// The network namespace to live in; without it a new, empty one is made.
    pub const NETWORK: i32 = 11;
    /// Restore only: the saved machine's state, read-only.
    pub const STATE: i32 = 12;
    /// Restore only: the saved machine's memory, read-only and never written again.
    pub const MEMORY: i32 = 13;
    /// A TAP interface, from /dev/net/tun with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`. Only with
    /// [`BootConfig::network`](super::BootConfig::network).
    pub const TAP: i32 = 14;
    /// One past the last.
    pub const END: i32 = 15;
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToMonitor {
    Boot(BootConfig),
    /// Take up a saved machine as a new one.
    Restore(RestoreConfig),
    Status,
    /// Stop the processors and put the devices to sleep. A machine that is paused already stays so.
    Pause,
    /// Go on where [`ToMonitor::Pause`] stopped.
    Resume,
    /// Write a paused machine to the two files that come along as `SCM_RIGHTS`: state, then memory. Both are empty,
    /// and synced when the answer is sent. The machine stays paused.
    Snapshot,
    /// End the machine at once, without asking the guest.
    Stop,
}

/// Who the monitor is on the host once it has its descriptors: a user and group that nothing else has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jail {
    /// Not 0.
    pub uid: u32,
    /// Not 0.
    pub gid: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootConfig {
    pub version: u16,
    pub jail: Jail,
    /// 1 to 32.
    pub vcpus: u8,
    /// 64 to 65536.
    pub memory_mib: u32,
    /// Context id of the guest on AF_VSOCK: unique on the host, 3 or more.
    pub cid: u32,
    /// Appended to the monitor's own kernel command line.
    pub cmdline: String,
    /// Give the guest a serial console and copy it to the monitor's standard error. Costs boot time: for debugging.
    pub console: bool,
    /// A network card on [`fd::TAP`]. None: the guest has none at all.
    pub network: Option<Network>,
}

/// What the guest reads off its network card. Addresses and routes are the agent's business, and who may talk to whom is
/// decided on the host's side of the tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Not a multicast address, not zero.
    pub mac: [u8; 6],
    /// Largest packet, in bytes: 1280 to 65521.
    pub mtu: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreConfig {
    pub version: u16,
    pub jail: Jail,
    /// Context id of this machine, which is another than the saved one's.
    pub cid: u32,
    /// Check the whole memory file against its checksums first. Costs a read of all of it: for the first restore of a
    /// file by a daemon, which then keeps it from changing.
    pub verify: bool,
    /// A network card on [`fd::TAP`], if the saved machine has one.
    pub network: Option<Network>,
    /// Pages to map before the guest runs, in ascending order: those that an earlier clone touched.
    pub prefetch: Vec<PageRun>,
    /// Read each page of the memory file only when it is touched, and none around it: whoever watches which pages of the
    /// file are in the host's page cache then sees what this machine touches.
    pub record: bool,
}

/// Neighbouring pages of a memory file. 4 KiB each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRun {
    pub first: u32,
    pub count: u32,
    /// They were written, so a clone will need copies of its own.
    pub written: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromMonitor {
    /// vCPUs are about to run.
    Booted(Timing),
    /// `exits`: how often a virtual processor has come out of the guest and into the monitor.
    Status {
        state: State,
        exits: u64,
    },
    Paused,
    Resumed,
    /// The files are complete and synced.
    Snapshotted,
    /// A request was not carried out, and the machine is as it was before.
    Refused {
        detail: String,
    },
    /// The machine is gone; the process exits after this message.
    Stopped(StopReason),
    /// The machine could not be made; the process exits after this message.
    Failed {
        detail: String,
    },
}

/// When each step of a start was done, in microseconds since the monitor's main function was entered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Told what to run.
    pub configured_us: u64,
    pub jailed_us: u64,
    pub vm_created_us: u64,
    /// Member of the sandbox's cgroup.
    pub joined_us: u64,
    /// Guest memory is mapped; for a machine that is taken up, its state is read and checked too.
    pub memory_us: u64,
    /// Interrupt controllers and devices are there.
    pub devices_us: u64,
    /// Kernel and tables are in guest memory.
    pub loaded_us: u64,
    /// The processors are there, as they are to start.
    pub processors_us: u64,
    /// Every thread runs, behind its filter.
    pub booted_us: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    Running,
    Paused,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// [`ToMonitor::Stop`].
    Requested,
    /// The guest powered off or reset itself.
    GuestShutdown,
    /// The guest's processor ended in a state it cannot leave: a triple fault, usually a kernel panic.
    GuestCrash { detail: String },
    /// A device or KVM refused to go on, or the guest broke the rules of a device.
    Fault { detail: String },
}

/// One message as one packet.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_allocvec(message)
}

/// One message from one packet.
pub fn decode<'a, T: Deserialize<'a>>(packet: &'a [u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(packet)
}
