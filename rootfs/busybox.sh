#!/bin/sh
# Makes the smallest tree that a shell feels at home in, in an empty folder: busybox, and a link for each of its tools.
set -eu
root=$1
umask 022

for folder in bin etc home/user mnt opt root sbin srv usr/bin usr/local/bin usr/local/sbin usr/sbin var/cache var/lib \
    var/log var/tmp; do
    mkdir -p "$root/$folder"
done
install -m 0755 /bin/busybox "$root/bin/busybox"
/bin/busybox --list-full | while read -r tool; do
    [ -e "$root/$tool" ] || ln -s /bin/busybox "$root/$tool"
done
ln -s /run "$root/var/run"
chmod 0700 "$root/root"
chmod 1777 "$root/var/tmp"
chown -R 1000:1000 "$root/home/user"
