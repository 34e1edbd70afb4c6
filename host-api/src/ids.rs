//! Identifiers: a type prefix and a ULID in lower case, so that they sort by the time they were made.
//!
//! Text from outside becomes an id only through `parse`, which accepts exactly what `new` makes; an id is therefore
//! safe as a file or cgroup name.

use ulid::Ulid;

const ULID_LEN: usize = 26;

fn ulid() -> String {
    Ulid::generate().to_string().to_ascii_lowercase()
}

fn is_ulid(text: &str) -> bool {
    text.len() == ULID_LEN
        && !text.bytes().any(|b| b.is_ascii_uppercase())
        && Ulid::from_string(&text.to_ascii_uppercase()).is_ok()
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            #[allow(clippy::new_without_default)]
            pub fn new() -> Self {
                Self(format!("{}{}", $prefix, ulid()))
            }

            pub fn parse(text: &str) -> Option<Self> {
                text.strip_prefix($prefix).filter(|rest| is_ulid(rest)).map(|_| Self(text.to_owned()))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id!(SandboxId, "sb_");
id!(CommandId, "cmd_");
id!(EventId, "ev_");

impl SandboxId {
    /// The name the guest goes by: a host name has no underscore.
    pub fn hostname(&self) -> String {
        self.0.replace('_', "-")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_its_text_and_nothing_else_is_one() {
        let id = SandboxId::new();
        assert_eq!(SandboxId::parse(id.as_str()), Some(id));
        for bad in [
            "",
            "sb_",
            "sb_../../../../etc/passwd...",
            "cmd_01arz3ndektsv4rrffq69g5fav",
            "sb_01ARZ3NDEKTSV4RRFFQ69G5FAV",
        ] {
            assert_eq!(SandboxId::parse(bad), None, "{bad}");
        }
    }
}
