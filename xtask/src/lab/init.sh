#!/bin/sh
# First program of the lab: makes this virtual machine look like the machine it runs on, as a bare-metal host with KVM.
#
# Runs from the initramfs (busybox). /lab.conf, written for each start, says:
#   HELPER   the xtask program that then becomes PID 1 (`xtask lab-inside`)
#   MODULES  folder on the machine with the modules of this kernel
#   SHARED   folders that are the machine's own and writable, one a line; everything else is a view that is thrown away

set -e
stop() { echo "lab: $1" >/dev/console; sleep 1; poweroff -f; }
trap 'stop "the set-up failed, see above"' EXIT

mkdir -p /proc /sys /dev /machine /shared /written /new
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
. /lab.conf

# The machine's root, read-only and cached for good, under a layer in memory.
insmod /overlay.ko
mount -t virtiofs -o ro machine /machine
mount -t tmpfs -o size=75% written /written
mkdir /written/upper /written/work
mount -t overlay -o lowerdir=/machine,upperdir=/written/upper,workdir=/written/work machine /new

mount --move /proc /new/proc
mount --move /sys /new/sys
mount --move /dev /new/dev
mkdir -p /dev /new/dev/pts /new/dev/shm
mount -t devpts -o mode=620,ptmxmode=666 devpts /new/dev/pts
mount -t tmpfs -o mode=1777 shm /new/dev/shm
ln -s /proc/self/fd /new/dev/fd
ln -s /proc/self/fd/0 /new/dev/stdin
ln -s /proc/self/fd/1 /new/dev/stdout
ln -s /proc/self/fd/2 /new/dev/stderr
mount -t tmpfs -o mode=1777 tmp /new/tmp
mount -t tmpfs -o mode=755 run /new/run

# Folders shared for writing, by a second door whose cache asks the machine before it trusts itself. Last, since one
# of them may be under /tmp.
mount -t virtiofs shared /shared
echo "$SHARED" | while read -r folder; do
    mkdir -p "/new$folder"
    mount --bind "/shared$folder" "/new$folder"
done

# Version 2 of control groups, with what a daemon hands on to its children.
mount -t cgroup2 -o nsdelegate cgroup /new/sys/fs/cgroup
for controller in cpuset cpu io memory pids; do
    echo "+$controller" >/new/sys/fs/cgroup/cgroup.subtree_control
done

# KVM by AMD's extension (which the emulator has), vsock for guests, tap; everything else is loaded when it is asked for.
version=$(uname -r)
mkdir -p "/new/lib/modules/$version"
mount --bind "/new$MODULES" "/new/lib/modules/$version"
chroot /new /sbin/modprobe -a kvm_amd vhost_vsock tun virtio_blk xfs

# State of a daemon: a real disk whose files can be cloned.
mkdir -p /new/var/lib/bivouac
chroot /new /bin/mount -t xfs /dev/vda /var/lib/bivouac

ip link set lo up
hostname lab

# As systemd sets it for every service; the kernel's own 4096 would be this lab's, not a host's.
ulimit -H -n 524288

trap - EXIT
exec switch_root /new "$HELPER" lab-inside
