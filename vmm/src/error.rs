//! One error for the crate's border. Messages read "what failed: why".

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("configuration refused: {0}")]
    Config(String),
    #[error("cannot {what}: {why}")]
    Kvm { what: &'static str, why: kvm_ioctls::Error },
    #[error("cannot set up guest memory: {0}")]
    Memory(String),
    #[error("cannot load the guest kernel: {0}")]
    Kernel(String),
    #[error("virtual processor {vcpu}: {why}")]
    Vcpu { vcpu: u8, why: String },
    #[error("cannot {what}: {why}")]
    Io { what: &'static str, why: io::Error },
    #[error("{device}: {why}")]
    Device { device: &'static str, why: String },
    /// The guest did what no driver may do. It ends this machine and touches nothing else.
    #[error("the guest broke a rule of {device}: {why}")]
    Guest { device: &'static str, why: String },
    #[error("control socket: {0}")]
    Control(String),
    #[error("cannot enter the jail: {0}")]
    Jail(String),
    /// A saved machine that is damaged, incomplete, or not for this host or monitor.
    #[error("snapshot refused: {0}")]
    Snapshot(String),
}

impl Error {
    pub fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |why| Self::Kvm { what, why }
    }

    pub fn io<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |why| Self::Io { what, why: why.into() }
    }
}
