#!/bin/sh
# Last step in making a Debian system, called with its root: takes out what belongs to the machine it was made on, what
# would differ the next time, and what nobody reads in a sandbox. Adds the user that commands run as.
set -eu
root=$1

# The mirrors of this machine may be private, and a sandbox has no network unless its template opens one: that template
# names the mirror too.
rm -f "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/*

# Each sandbox is told its name when it starts, and makes an id of its own if a program wants one.
rm -f "$root/etc/hostname"
: >"$root/etc/machine-id"

echo 'user:x:1000:1000:user:/home/user:/bin/bash' >>"$root/etc/passwd"
echo 'user:x:1000:' >>"$root/etc/group"
echo 'user:!:::::::' >>"$root/etc/shadow"
echo 'user:!::' >>"$root/etc/gshadow"
mkdir -p "$root/home/user"
cp "$root/etc/skel/.bashrc" "$root/etc/skel/.profile" "$root/home/user/"
chown -R 1000:1000 "$root/home/user"

# The day a password was last changed is the day this ran.
sed -i 's/^\([^:]*:[^:]*\):[0-9]*:/\1::/' "$root/etc/shadow"

# Caches, logs, and copies that tools keep of what they changed.
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/cache/ldconfig/* "$root"/var/cache/debconf/*-old
find "$root/var/log" -type f -delete
rm -f "$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow- "$root"/etc/subuid- "$root"/etc/subgid-
rm -f "$root"/var/lib/dpkg/*-old "$root/etc/.pwd.lock"
