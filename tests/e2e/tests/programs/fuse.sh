# shellcheck shell=bash
mkdir tree at && cp -r /etc/init.d tree/
ln -s nowhere tree/link
mksquashfs tree tree.squashfs -quiet -no-progress >&2
squashfuse tree.squashfs at
findmnt -no FSTYPE at
diff -r --no-dereference tree at && echo same
readlink at/link
touch at/new 2>/dev/null || echo read-only
fusermount -u at
findmnt at || echo gone
