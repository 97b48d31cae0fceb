#!/bin/busybox sh
# PID 1 of the contract tests' guest: answers one line per line on the agent's port.
/bin/busybox --install -s /bin
mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys

# As the agent does.
echo 5 >/sys/module/page_reporting/parameters/page_reporting_order

# The host tells of the port, and then of its name, some time after the device is there.
until [ -n "$device" ]; do
    for port in /sys/class/virtio-ports/*; do
        [ "$(cat "$port/name" 2>/dev/null)" = org.sandboxer.agent ] && device=/dev/${port##*/}
    done
    usleep 1000
done

# The block device whose serial number is $1.
find_disk() {
    for page in /sys/block/vd*/serial /sys/block/sd*/device/vpd_pg80; do
        case $page in
            */vpd_pg80) serial=$(tail -c +5 "$page" 2>/dev/null) ;;
            *) serial=$(cat "$page" 2>/dev/null) ;;
        esac
        [ "$serial" = "$1" ] || continue
        disk=${page#/sys/block/}
        echo "${disk%%/*}"
        return
    done
    return 1
}

exec 3<>"$device"
while :; do
    # A read fails while nobody is connected on the host's side.
    read -r command argument <&3 || { usleep 10000; continue; }
    case $command in
        remember) memory=$argument; echo noted >&3 ;;
        recall) echo "$memory" >&3 ;;
        fill) dd if=/dev/zero of=/filled bs=1M count="$argument" 2>/dev/null && echo filled >&3 ;;
        free) rm /filled && echo freed >&3 ;;
        nic) cat /sys/class/net/eth0/address >&3 ;;
        # MiB.
        memory) awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo >&3 ;;
        hello) echo "hello host" >&3 ;;
        await)
            until disk=$(find_disk "$argument") && [ -b "/dev/$disk" ]; do usleep 10000; done
            echo "disk $argument ro=$(cat "/sys/block/$disk/ro") starts with $(head -n 1 "/dev/$disk")" >&3
            ;;
        # The controllers of all disks, by the disks' names.
        controllers)
            for link in /sys/block/sd*/device; do
                path=$(readlink -f "$link")
                host=${path#*/host}
                printf '%s ' "${host%%/*}"
            done >&3
            echo >&3
            ;;
        await-gone)
            while find_disk "$argument" >/dev/null; do usleep 10000; done
            echo "gone $argument" >&3
            ;;
        ask-for-files)
            # What a kernel begins with (FUSE_INIT), in the first slot; of the answer, its state and its head.
            until disk=$(find_disk shares) && [ -b "/dev/$disk" ]; do usleep 10000; done
            printf '\150\0\0\0\032\0\0\0\7\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\7\0\0\0\044' |
                dd of="/dev/$disk" bs=512 conv=sync,fsync 2>/dev/null
            blockdev --flushbufs "/dev/$disk"
            echo "$(dd if="/dev/$disk" bs=512 skip=4103 count=1 2>/dev/null | tail -c 20 | od -An -v -tx1 | tr -d ' \n')" >&3
            ;;
        power-off)
            echo "guest says goodbye" >/dev/console
            # As the agent does: without ACPI a VM ends by a reset.
            if grep -qw acpi=off /proc/cmdline; then reboot -f; else poweroff -f; fi
            ;;
        panic) exit 1 ;;
    esac
done
