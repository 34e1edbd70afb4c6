//! The contract, through the router, on the simulated machine: what needs no KVM is tested without it.

mod harness;

mod commands;
mod files;
mod identity;
mod lifecycle;
mod requests;
mod restart;
