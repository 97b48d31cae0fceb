# shellcheck shell=bash
mkdir at
truncate -s 32M disk
mkfs.ext4 -q disk
mount -o loop disk at
echo content >at/file
df --output=fstype at | tail -n 1
sync && umount at
e2fsck -fn disk >&2 && echo checked
mount -o loop,ro disk at
cat at/file
touch at/new 2>/dev/null || echo read-only
umount at
losetup -j disk | wc -l
