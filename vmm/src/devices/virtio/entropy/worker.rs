//! Fills the first writable segment of each request, from a buffer of fixed size: a guest cannot make the monitor
//! allocate by asking for more.

use super::REQUEST_MAX;
use crate::{Error, devices::virtio::runner::Worker, memory::Memory};
use virtio_queue::DescriptorChain;
use vm_memory::Bytes;

pub struct EntropyWorker;

impl Worker for EntropyWorker {
    fn name(&self) -> &'static str {
        "entropy"
    }

    fn serve(&mut self, memory: &Memory, mut chain: DescriptorChain<&Memory>) -> Result<u32, Error> {
        let broken = |why: &str| Error::Guest { device: "entropy", why: why.to_owned() };
        let segment = chain.next().ok_or_else(|| broken("a request has no buffer"))?;
        if !segment.is_write_only() {
            return Err(broken("a request's buffer cannot be written"));
        }
        let mut buffer = [0_u8; REQUEST_MAX];
        let wanted = (segment.len() as usize).min(REQUEST_MAX);
        let bytes = buffer.get_mut(..wanted).unwrap_or_default();
        // SAFETY: the pointer and length are those of one exclusively borrowed slice.
        let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if usize::try_from(got) != Ok(wanted) {
            return Err(Error::Io { what: "read random bytes", why: std::io::Error::last_os_error() });
        }
        memory.write_slice(bytes, segment.addr()).map_err(|_| broken("a request lies outside memory"))?;
        u32::try_from(wanted).map_err(|_| broken("a request is too long"))
    }
}
