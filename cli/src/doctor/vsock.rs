//! Who else listens on AF_VSOCK: every guest can reach such a listener, whatever its network policy says.

use super::Finding;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};
use std::{collections::HashMap, fs};

/// `SOCK_DIAG_BY_FAMILY` of <linux/sock_diag.h>.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST_DUMP: u16 = 0x0301;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const AF_VSOCK: u8 = 40;
/// `TCP_LISTEN`, which AF_VSOCK sockets use too.
const LISTEN: u8 = 10;
const HEADER: usize = 16;
const NAME: &str = "vsock_listeners";

/// The daemon's name, as the kernel keeps it for its process.
const OURS: &str = "bivouacd";

/// A socket that listens.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Listener {
    port: u32,
    inode: u32,
}

/// A process that holds such a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Owner {
    name: String,
    pid: u32,
}

pub fn other_listeners() -> Finding {
    match listening() {
        Ok(listeners) => {
            let owners = owners();
            let found: Vec<_> = listeners
                .into_iter()
                .map(|listener| (listener.port, owners.get(&listener.inode).cloned().unwrap_or_default()))
                .collect();
            judge(&found)
        }
        Err(e) => Finding::bad(
            NAME,
            false,
            format!("cannot list AF_VSOCK listeners: {e}"),
            "modprobe vsock_diag, and run this again to be sure that no guest can reach a listener",
        ),
    }
}

/// What the listeners come to: each with its port and who holds it, nobody where that cannot be seen.
fn judge(found: &[(u32, Vec<Owner>)]) -> Finding {
    let ours = |owners: &[Owner]| !owners.is_empty() && owners.iter().all(|owner| owner.name == OURS);
    let (own, others): (Vec<_>, Vec<_>) = found.iter().partition(|(_, owners)| ours(owners));
    let list = |listeners: &[&(u32, Vec<Owner>)]| {
        let each = listeners.iter().map(|(port, owners)| format!("port {port} ({})", named(owners)));
        each.collect::<Vec<_>>().join(", ")
    };
    if !others.is_empty() {
        return Finding::bad(
            NAME,
            false,
            format!("listening on AF_VSOCK: {}; every guest can reach these", list(&others)),
            if others.iter().any(|(_, owners)| owners.is_empty()) {
                "run this as root to see whose they are, and stop what need not listen"
            } else {
                "stop them, or see that they trust no guest"
            },
        );
    }
    if own.is_empty() {
        return Finding::good(NAME, false, "nothing on this host listens on AF_VSOCK");
    }
    let detail = format!("only the daemon itself listens on AF_VSOCK: {}", list(&own));
    Finding::good(NAME, false, detail)
}

fn named(owners: &[Owner]) -> String {
    if owners.is_empty() {
        return "of a process that cannot be seen".to_owned();
    }
    let each = owners.iter().map(|owner| format!("{}, process {}", owner.name, owner.pid));
    each.collect::<Vec<_>>().join("; ")
}

/// Who holds which socket, by the socket's inode, as far as this user may look.
fn owners() -> HashMap<u32, Vec<Owner>> {
    let mut found: HashMap<u32, Vec<Owner>> = HashMap::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(pid) = process.file_name().to_string_lossy().parse::<u32>() else { continue };
        let held = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let mut inodes: Vec<u32> = held
            .filter_map(|fd| fs::read_link(fd.path()).ok())
            .filter_map(|target| socket_inode(target.to_str()?))
            .collect();
        inodes.sort_unstable();
        inodes.dedup();
        if inodes.is_empty() {
            continue;
        }
        let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default().trim().to_owned();
        for inode in inodes {
            found.entry(inode).or_default().push(Owner { name: name.clone(), pid });
        }
    }
    found
}

/// `socket:[1234]`, as a descriptor's link in /proc reads.
fn socket_inode(link: &str) -> Option<u32> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Asks the kernel by sock_diag: the same question as `ss --vsock -l`.
fn listening() -> Result<Vec<Listener>, rustix::io::Errno> {
    let socket =
        socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    // struct nlmsghdr, then struct vsock_diag_req: family, protocol, padding, states, inode, show, cookie.
    let mut request = Vec::with_capacity(HEADER + 24);
    request.extend_from_slice(&40_u32.to_ne_bytes());
    request.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend_from_slice(&NLM_F_REQUEST_DUMP.to_ne_bytes());
    request.extend_from_slice(&[0; 8]);
    request.extend_from_slice(&[AF_VSOCK, 0, 0, 0]);
    request.extend_from_slice(&(1_u32 << LISTEN).to_ne_bytes());
    request.resize(HEADER + 24, 0);
    send(&socket, &request, SendFlags::empty())?;

    let mut listeners = Vec::new();
    let mut buffer = vec![0; 32 << 10];
    loop {
        let (_, len) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = buffer.get(..len).unwrap_or_default();
        if rest.is_empty() {
            return Err(rustix::io::Errno::IO);
        }
        while let Some((message_len, kind)) = header(rest) {
            match kind {
                NLMSG_DONE => return Ok(listeners),
                NLMSG_ERROR => return Err(rustix::io::Errno::NOENT),
                _ => listeners.extend(listener(rest)),
            }
            rest = rest.get(message_len.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// From `struct nlmsghdr` and the `struct vsock_diag_msg` behind it: family, type, state and shutdown of one byte each,
/// then source CID and port, destination CID and port, and inode, of four bytes each.
fn listener(message: &[u8]) -> Option<Listener> {
    let number = |at: usize| {
        let bytes = message.get(HEADER + at..HEADER + at + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    };
    (message.get(HEADER + 2) == Some(&LISTEN)).then_some(())?;
    Some(Listener { port: number(8)?, inode: number(20)? })
}

/// Length and type of the message at the front.
fn header(bytes: &[u8]) -> Option<(usize, u16)> {
    let len = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    (HEADER..=bytes.len()).contains(&len).then_some((len, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str, pid: u32) -> Owner {
        Owner { name: name.to_owned(), pid }
    }

    #[test]
    fn our_own_daemon_is_no_reason_to_warn_and_anybody_else_is_named() {
        assert!(judge(&[]).ok);
        let own = judge(&[(1234, vec![owner(OURS, 7)])]);
        assert!(own.ok && own.detail.contains("1234 (bivouacd, process 7)"), "{}", own.detail);

        let found = [(1234, vec![owner(OURS, 7)]), (22, vec![owner("systemd", 1)])];
        let other = judge(&found);
        assert!(!other.ok && other.detail.contains("22 (systemd, process 1)"), "{}", other.detail);
        assert!(!other.detail.contains("1234"), "{}", other.detail);

        let shared = judge(&[(1234, vec![owner(OURS, 7), owner("other", 8)])]);
        assert!(!shared.ok && shared.detail.contains("other, process 8"), "{}", shared.detail);
        let unseen = judge(&[(22, vec![])]);
        assert!(!unseen.ok && unseen.fix.unwrap().contains("as root"));
    }

    #[test]
    fn a_message_of_the_kernel_tells_port_and_inode() {
        let mut message = vec![0; HEADER];
        message.extend([AF_VSOCK, 1, LISTEN, 0]);
        for number in [u32::MAX, 1234, 0, 0, 5678, 0, 0] {
            message.extend(number.to_ne_bytes());
        }
        assert_eq!(listener(&message), Some(Listener { port: 1234, inode: 5678 }));
        assert_eq!(listener(&message[..30]), None);
        message[HEADER + 2] = 1;
        assert_eq!(listener(&message), None, "a connection");
        assert_eq!(socket_inode("socket:[5678]"), Some(5678));
        assert_eq!(socket_inode("pipe:[5678]"), None);
    }
}
