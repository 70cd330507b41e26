# shellcheck shell=sh
# Pid 1 of the guest: mounts what an init system would, runs the command, writes its status, switches off.

vm_cgroup='' vm_directory='' vm_modules=''
# shellcheck disable=SC1091  # made for each machine: PATH and the variables above
. /run/vm/settings
export HOME=/root TERM=dumb PATH NSBOX_IN_VM="$vm_cgroup"

mkdir -p /dev/pts /dev/shm /run/lock
mount -t devpts -o ptmxmode=666,gid=5,mode=620 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t securityfs securityfs /sys/kernel/security
stty -F /dev/ttyS1 raw -echo
exec </dev/null >/dev/ttyS1 2>&1

release=$(uname -r)
[ -e "/lib/modules/$release" ] || { mkdir -p /lib/modules && ln -s "$vm_modules" "/lib/modules/$release"; }
echo nsbox-vm >/proc/sys/kernel/hostname
ip link set lo up

mount_v1() {
    mkdir "/sys/fs/cgroup/$1"
    mount -t cgroup -o "$1" cgroup "/sys/fs/cgroup/$1" 2>/dev/null || rmdir "/sys/fs/cgroup/$1"
}
case $vm_cgroup in
v2)
    mount -t cgroup2 -o nsdelegate,memory_recursiveprot cgroup2 /sys/fs/cgroup
    # As an init system does it: nobody stays in the root group, and it shares out every controller.
    mkdir /sys/fs/cgroup/init
    echo $$ >/sys/fs/cgroup/init/cgroup.procs
    sed 's/[^ ]*/+&/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
    ;;
hybrid | v1)
    mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    for controllers in memory pids cpu,cpuacct blkio freezer devices; do mount_v1 "$controllers"; done
    if [ "$vm_cgroup" = hybrid ]; then
        mkdir /sys/fs/cgroup/unified
        mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup/unified
    fi
    ;;
esac

# This machine's /tmp goes on changing below the overlay, and the tests look at what appears there.
case "$vm_directory $vm_modules $(cat /run/vm/command)" in
*/tmp/*) ;;
*) mount -t tmpfs -o mode=1777 tmpfs /tmp ;;
esac
mkdir -p /mnt/memory /mnt/root
chmod 1777 /mnt/root
mount -t tmpfs -o mode=1777 tmpfs /mnt/memory
if command -v mkfs.ext4 >/dev/null && mkfs.ext4 -q /dev/vda; then
    mkdir -p /mnt/disk
    mount -t ext4 /dev/vda /mnt/disk
    mkdir -m 1777 /mnt/disk/var-tmp
    mount --bind /mnt/disk/var-tmp /var/tmp
    chmod 1777 /mnt/disk
fi

cd "$vm_directory" || exit
sh /run/vm/command
echo $? >/run/vm/status
sync
echo o >/proc/sysrq-trigger
sleep 60
