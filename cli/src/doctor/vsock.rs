//! Who else listens on AF_VSOCK: every guest can reach such a listener, whatever its network policy says.

use super::Finding;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// `SOCK_DIAG_BY_FAMILY` of <linux/sock_diag.h>.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST_DUMP: u16 = 0x0301;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const AF_VSOCK: u8 = 40;
/// `TCP_LISTEN`, which AF_VSOCK sockets use too.
const LISTEN: u8 = 10;
const HEADER: usize = 16;

pub fn other_listeners() -> Finding {
    let name = "vsock_listeners";
    match listening_ports() {
        Ok(ports) if ports.is_empty() => {
            Finding::good(name, false, "nothing on this host listens on AF_VSOCK")
        }
        Ok(ports) => {
            let list: Vec<String> = ports.iter().map(u32::to_string).collect();
            Finding::bad(
                name,
                false,
                format!("listening on AF_VSOCK: port {}; every guest can reach these", list.join(", ")),
                "one of them may be bivouacd itself; stop the others, or see that they trust no guest \
                 (ss --vsock -lp names them)",
            )
        }
        Err(e) => Finding::bad(
            name,
            false,
            format!("cannot list AF_VSOCK listeners: {e}"),
            "modprobe vsock_diag, and run this again to be sure that no guest can reach a listener",
        ),
    }
}

/// Asks the kernel by sock_diag: the same question as `ss --vsock -l`.
fn listening_ports() -> Result<Vec<u32>, rustix::io::Errno> {
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

    let mut ports = Vec::new();
    let mut buffer = vec![0; 32 << 10];
    loop {
        let (_, len) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = buffer.get(..len).unwrap_or_default();
        if rest.is_empty() {
            return Err(rustix::io::Errno::IO);
        }
        while let Some((message_len, kind)) = header(rest) {
            match kind {
                NLMSG_DONE => return Ok(ports),
                NLMSG_ERROR => return Err(rustix::io::Errno::NOENT),
                // struct vsock_diag_msg: family, type, state, shutdown, source CID, source port, ...
                _ => {
                    let port = rest.get(HEADER + 8..HEADER + 12).and_then(|bytes| bytes.try_into().ok());
                    if rest.get(HEADER + 2) == Some(&LISTEN) {
                        ports.extend(port.map(u32::from_ne_bytes));
                    }
                }
            }
            rest = rest.get(message_len.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// Length and type of the message at the front.
fn header(bytes: &[u8]) -> Option<(usize, u16)> {
    let len = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    (HEADER..=bytes.len()).contains(&len).then_some((len, kind))
}
