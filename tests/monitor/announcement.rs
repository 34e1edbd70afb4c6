//! How a guest says that it is there.

use crate::world::{SMALL, World, wait};
use bivouac_protocol::agent::{AGENT_PORT, Hello, PORT_PARAMETER, VERSION};
use bivouacd::agent::wire;
use std::time::Duration;
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener, VsockStream};

/// Nobody listens there until the guest has tried.
const PORT: u32 = 77_777;

#[test]
fn an_agent_that_nobody_heard_says_again_that_it_is_there() {
    let world = World::new();
    let mut spec = world.spec(SMALL, None);
    spec.cmdline = format!("{PORT_PARAMETER}={PORT}");
    let guest = world.launch(&spec).unwrap();
    // It listens before it announces itself, and has been refused by the time it takes a second connection.
    for _ in 0..2 {
        wait("the agent listens", async {
            while VsockStream::connect(VsockAddr::new(guest.cid, AGENT_PORT)).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }
    let hello = wait("the agent says again that it is there", async {
        let listener = VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, PORT)).unwrap();
        let (mut stream, peer) = listener.accept().await.unwrap();
        assert_eq!(peer.cid(), guest.cid);
        wire::receive::<Hello>(&mut stream).await.unwrap()
    });
    assert_eq!(hello.version, VERSION);
}
