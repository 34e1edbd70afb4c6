//! The tap's own dealings with the kernel.

use super::*;
use crate::devices::virtio::net::tap::{FLAGS, Tap, offload_flags};
use std::{fs::File, os::fd::AsRawFd, thread};

#[test]
fn the_tap_is_told_what_the_driver_takes_and_no_segments_without_checksums() {
    let (csum, tso4, tso6) = (libc::TUN_F_CSUM, libc::TUN_F_TSO4, libc::TUN_F_TSO6);
    for (features, expected) in [
        (0, 0),
        (feature::CSUM | feature::HOST_TSO4, 0),
        (feature::GUEST_CSUM, csum),
        (feature::GUEST_TSO4 | feature::GUEST_TSO6, 0),
        (feature::GUEST_CSUM | feature::GUEST_TSO4, csum | tso4),
        (feature::GUEST_CSUM | feature::GUEST_TSO4 | feature::GUEST_TSO6, csum | tso4 | tso6),
    ] {
        assert_eq!(offload_flags(features), expected);
    }
}

#[test]
fn a_descriptor_that_is_no_tap_is_refused() {
    let null = File::open("/dev/null").unwrap();
    assert!(matches!(Tap::new(null), Err(Error::Config(_))));
}

/// An interface in a network namespace that ends with the calling thread, or none where the host does not allow that.
fn interface(flags: libc::c_int) -> Option<File> {
    // SAFETY: concerns the calling thread only.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return None;
    }
    let file = File::options().read(true).write(true).open("/dev/net/tun").ok()?;
    // SAFETY: all zeroes is a value of this struct of plain numbers; the call reads and fills in one.
    let status = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request)
    };
    (status == 0).then_some(file)
}

/// On a thread of its own, whose network namespace no other test sees.
fn with_interface(flags: libc::c_int, test: fn(File)) {
    let ran = thread::spawn(move || interface(flags).map(test).is_some()).join().unwrap();
    if !ran {
        eprintln!("notice: this host makes no tap for a test, which is left out");
    }
}

#[test]
fn a_real_tap_keeps_every_offload_and_never_waits() {
    with_interface(FLAGS, |file| {
        let mut tap = Tap::new(file).unwrap();
        let all = [1, 1 << 1, 1 << 7, 1 << 8, 1 << 11, 1 << 12].into_iter().sum::<u64>();
        assert_eq!(tap.features(), all);
        tap.offload(all).unwrap();
        let mut bytes = [0_u8; 72];
        let vectors = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
        assert_eq!(tap.receive(&vectors).unwrap(), None);
        // It is down.
        assert_eq!(tap.send(&vectors).unwrap_err().raw_os_error(), Some(libc::EIO));
    });
}

#[test]
fn an_interface_that_gives_no_headers_is_refused() {
    with_interface(libc::IFF_TAP | libc::IFF_NO_PI, |file| {
        assert!(matches!(Tap::new(file), Err(Error::Config(_))));
    });
}
