//! Users and groups, from the image's own files, read anew each time: a command may have changed them.

use bivouac_protocol::agent::StartFailureKind;
use std::fs;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Empty for a number that the image has no name for.
    pub name: String,
    pub home: String,
}

#[derive(Debug, thiserror::Error)]
#[error("no user `{0}` in the sandbox's /etc/passwd")]
pub struct NoSuchUser(pub String);

impl NoSuchUser {
    pub const KIND: StartFailureKind = StartFailureKind::NoSuchUser;
}

/// A user by name, by number, or as `number:group number`.
pub fn find(wanted: &str) -> Result<User, NoSuchUser> {
    let read =
        |path| fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    find_in(wanted, &read("/etc/passwd"), &read("/etc/group"))
}

fn find_in(wanted: &str, passwd: &str, group: &str) -> Result<User, NoSuchUser> {
    let (account, gid) = match wanted.split_once(':') {
        Some((account, gid)) => (account, Some(gid.parse().map_err(|_| NoSuchUser(wanted.to_owned()))?)),
        None => (wanted, None),
    };
    let number: Option<u32> = account.parse().ok();
    let entry = passwd
        .lines()
        .filter_map(Account::parse)
        .find(|entry| entry.name == account || number == Some(entry.uid));
    match (entry, number) {
        (Some(entry), _) => Ok(User {
            uid: entry.uid,
            gid: gid.unwrap_or(entry.gid),
            groups: groups_of(entry.name, group),
            name: entry.name.to_owned(),
            home: entry.home.to_owned(),
        }),
        (None, Some(uid)) => Ok(User {
            uid,
            gid: gid.unwrap_or(uid),
            groups: Vec::new(),
            name: String::new(),
            home: "/".into(),
        }),
        // An image without accounts still has its root.
        (None, None) if account == "root" => Ok(User {
            uid: 0,
            gid: gid.unwrap_or(0),
            groups: Vec::new(),
            name: "root".into(),
            home: "/root".into(),
        }),
        (None, None) => Err(NoSuchUser(wanted.to_owned())),
    }
}

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl<'a> Account<'a> {
    /// `name:password:uid:gid:comment:home:shell`; what is not of that form is passed over.
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        let home = fields.nth(1).filter(|home| home.starts_with('/')).unwrap_or("/");
        Some(Self { name, uid, gid, home })
    }
}

/// `name:password:gid:member,member`
fn groups_of(name: &str, group: &str) -> Vec<u32> {
    group
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            let gid = fields.nth(2)?.parse().ok()?;
            fields.next()?.split(',').any(|member| member == name).then_some(gid)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\nbroken line\nuser:x:1000:1001:,,,:/home/user:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nadm:x:4:daemon,user\nuser:x:1001:\n";

    #[test]
    fn users_are_found_by_name_number_and_number_with_group() {
        let user = find_in("user", PASSWD, GROUP).unwrap();
        assert_eq!(
            (user.uid, user.gid, user.groups.as_slice(), user.home.as_str()),
            (1000, 1001, &[4][..], "/home/user")
        );
        assert_eq!(find_in("1000", PASSWD, GROUP).unwrap(), user);
        assert_eq!(find_in("1000:7", PASSWD, GROUP).unwrap().gid, 7);
        assert_eq!(find_in("4242", PASSWD, GROUP).unwrap().home, "/");
        assert!(find_in("nobody-here", PASSWD, GROUP).is_err());
        assert!(find_in("user:x", PASSWD, GROUP).is_err());
        assert_eq!(find_in("root", "", "").unwrap().uid, 0);
    }
}
