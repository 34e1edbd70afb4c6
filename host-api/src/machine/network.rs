//! The network namespace of monitors whose sandbox reaches nothing: empty, and one for all, since making one takes
//! milliseconds and a monitor, behind its filters, can do nothing in it that another could see.

use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

/// Makes one. It lives as long as the descriptor, or a process in it.
pub fn empty() -> io::Result<OwnedFd> {
    let made = std::thread::spawn(|| {
        // SAFETY: changes the network namespace of this thread, which ends here, and shares nothing less.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
        File::open("/proc/thread-self/ns/net")
    });
    made.join().map_err(|_| io::Error::other("the thread that makes it broke off"))?.map(Into::into)
}
