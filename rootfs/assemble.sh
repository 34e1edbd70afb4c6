#!/bin/sh
# Makes the image of a template. Run in a mount namespace of its own, as root:
#
#   assemble.sh TREE.tar FILES AGENT EMPTY-FOLDER IMAGE
#
# The same inputs must give the same bytes: mkfs.erofs lays files out in the order in which folders list them, and a
# tmpfs lists them in the order in which they were made, so everything is made in order of name on a fresh tmpfs.
set -eu
tree_tar=$1 files=$2 agent=$3 tree=$4 image=$5

# Gone with the namespace, however this ends.
mount -t tmpfs -o size=90%,mode=755 tree "$tree"
umask 022
tar --numeric-owner --xattrs --xattrs-include='*' -xpf "$tree_tar" -C "$tree"
tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX -C "$files" -cf - . |
    tar --numeric-owner -xpf - -C "$tree"

# PID 1, and the folders it mounts on.
mkdir -p "$tree/.bivouac"
install -m 0755 "$agent" "$tree/.bivouac/agent"
for folder in .bivouac/lower .bivouac/root .bivouac/scratch proc sys dev run tmp; do
    mkdir -p "$tree/$folder"
done
chmod 1777 "$tree/tmp"

# Files of packages keep their time (Python compares it with what it compiled); what was made here gets the time of the
# newest of them, or a fixed one where there are no packages.
newest=1767225600
if [ -d "$tree/var/lib/dpkg/info" ]; then
    newest=$(cat "$tree"/var/lib/dpkg/info/*.list | sed "s|^|$tree|" | tr '\n' '\0' |
        xargs -0 stat -c '%f %Y' 2>/dev/null | sed -n 's/^8[0-9a-f]* //p' | sort -n | tail -n 1)
fi
export SOURCE_DATE_EPOCH="$newest"

# Uncompressed: its pages are the host's page cache, shared by every sandbox, and nothing unpacks them.
mkfs.erofs --quiet -U b1b0ac00-0000-4000-8000-000000000001 "$image" "$tree"
