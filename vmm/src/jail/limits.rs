//! Limits on what one monitor can hold of the host, beside the memory, processor and process limits of its cgroup.

use crate::Error;
use rustix::process::{Resource, Rlimit, setrlimit};

/// Descriptors: two per queue and processor leave room many times over.
const DESCRIPTORS: u64 = 256;
/// Threads of the monitor's user, KVM's and vhost's workers among them: the largest machine has 32 processors.
const THREADS: u64 = 64;

/// `largest_file`: bytes of the largest file this monitor may write, which is its disk or a snapshot of its memory.
pub fn set(largest_file: u64) -> Result<(), Error> {
    let limits = [
        (Resource::Nofile, DESCRIPTORS),
        (Resource::Nproc, THREADS),
        (Resource::Fsize, largest_file),
        (Resource::Core, 0),
        (Resource::Memlock, 0),
        (Resource::Msgqueue, 0),
    ];
    for (resource, most) in limits {
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
            .map_err(Error::io("set the jail's limits"))?;
    }
    Ok(())
}
