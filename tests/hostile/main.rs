//! A guest that is out for its monitor, on the monitor that is shipped, in the jail that it has: whatever the guest tries ends its
//! own machine, by name, or does nothing at all. A sandbox on the same host answers throughout.
//!
//! The guest is `hostile-guest/`, which has its attacks described. `BIVOUAC_HOSTILE_TIMES=N` has those that go in rounds do N
//! times as many, and the random ones begin from N times as many seeds.

mod ground;
mod harmless;
mod rules;
