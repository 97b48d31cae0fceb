# shellcheck shell=bash
mkdir at
mount -t tmpfs -o size=4m,nr_inodes=100,mode=1750 tmpfs at
stat -c %a at
head -c 8M /dev/zero >at/file 2>/dev/null || stat -c %s at/file
rm at/file
mount -o remount,size=16m at
head -c 8M /dev/zero >at/file && echo fits
for n in $(seq 200); do : >at/$n; done 2>/dev/null || echo "no more inodes"
cp /bin/true at/file
mount -o remount,noexec at
at/file 2>/dev/null || echo "not executable: $?"
mkdir bound && mount --bind at bound && mount -o remount,bind,ro bound
touch bound/file 2>/dev/null || echo read-only
umount bound at && findmnt at || echo gone
