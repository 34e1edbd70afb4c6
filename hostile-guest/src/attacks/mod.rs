//! The attacks, by name. Each returns when it got through what it tried; those that a monitor has to answer by ending the machine
//! wait for that, and return when it does not come.

mod blind;
mod interrupts;
mod registers;
mod reset;
mod rings;

use crate::{orders::Orders, random::Random};

type Attack = fn(&Random, &Orders);

/// Every attack there is. `tests/hostile` has for each of them how it must end.
pub const ALL: &[(&str, Attack)] = &[
    ("ring-index", rings::index),
    ("ring-entry", rings::entry),
    ("endless-chain", rings::endless_chain),
    ("looping-chain", rings::looping_chain),
    ("indirect", rings::indirect),
    ("outside", rings::outside),
    ("outside-data", rings::outside_data),
    ("huge-length", rings::huge_length),
    ("no-request", rings::no_request),
    ("entropy", rings::entropy),
    ("placement", rings::placement),
    ("rewrite", rings::rewrite),
    ("vsock-lies", rings::vsock_lies),
    ("chaos", rings::chaos),
    ("flood", rings::flood),
    ("registers", registers::all),
    ("live-registers", registers::live),
    ("notify", registers::notify),
    ("ports", blind::ports),
    ("gap", blind::gap),
    ("execute", blind::execute),
    ("hypercalls", blind::hypercalls),
    ("crash", blind::crash),
    ("storm", interrupts::storm),
    ("reset", reset::in_flight),
    ("mix", mix),
];

pub fn find(name: &[u8]) -> Option<Attack> {
    ALL.iter().find(|(known, _)| known.as_bytes() == name).map(|(_, attack)| *attack)
}

/// Everything that a machine survives, in any order, a little of each at a time.
fn mix(random: &Random, orders: &Orders) {
    const SURVIVED: &[Attack] = &[
        rings::outside_data,
        rings::vsock_lies,
        registers::all,
        registers::live,
        registers::notify,
        blind::ports,
        blind::gap,
        interrupts::storm,
        reset::in_flight,
    ];
    let mut little = orders.with_count(16);
    for _ in 0..orders.count(100) {
        little.seed = random.word();
        random.of(SURVIVED)(random, &little);
    }
}
