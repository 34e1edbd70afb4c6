//! Each test is a promise of the monitor, shown on the release build, a real guest, and the code that the daemon drives
//! it with. What is seen from outside (`/proc`, the disk, the guest's agent) counts, never what the monitor says of itself.

mod announcement;
mod clones;
mod disk;
mod interrupted;
mod jail;
mod pause;
mod process;
mod refusals;
mod shapes;
mod trace;
mod violations;
mod working_set;
mod world;
