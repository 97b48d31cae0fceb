# In a node VM whose payload has Kata's files (NODE_FILES): prepares what Kata needs, and its handlers for a stack. bench.sh sources it.
# shellcheck shell=bash

kata=$CACHE/files
[[ -d $kata ]] || die "the payload has no files of Kata: make it with NODE_FILES=DIR"

# What the Go shim needs of a node: a syslog socket, NETLINK_XFRM, and mounts that propagate.
mount --make-rshared /
for module in xfrm_user xfrm_algo; do modprobe "$module" || say "no module $module: the Go shim fails without it"; done
socat -u UNIX-RECV:/dev/log,mode=666 OPEN:/dev/null &

# As it is, but for the files, the memory, and the VMM, which is the program file of both sides.
# configured FROM: prints it with those keys.
configured() {
    local root=(-e "s|^ *#* *image *=.*|image = \"$kata/kata.img\"|" -e "s|^ *initrd *=.*|# &|")
    # An initrd has no file system.
    [[ -s $kata/kata.img ]] || root=(-e "s|^ *image *=.*|# &|" -e "s|^ *#* *initrd *=.*|initrd = \"$kata/kata.initrd\"|" -e "s|^ *rootfs_type *=.*|# &|")
    sed -e "s|^ *path *=.*|path = \"/usr/bin/qemu-system-x86_64\"|" -e "s|^ *kernel *=.*|kernel = \"$kata/vmlinux\"|" \
        -e "s|^ *virtio_fs_daemon *=.*|virtio_fs_daemon = \"$kata/virtiofsd\"|" \
        -e "s|^ *default_memory *=.*|default_memory = ${STACK_MEMORY:-256}|" "${root[@]}" "$1"
}

# handler NAME SHIM CONFIGURATION
handler() {
    cat <<END

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.$1]
  runtime_type = "io.containerd.kata.v2"
  runtime_path = "$2"
  snapshotter = "overlayfs"
  pod_annotations = ["io.katacontainers.*"]
  privileged_without_host_devices = true
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.$1.options]
  ConfigPath = "$3"
END
}

mkdir -p /etc/kata-containers /tmp/guest
configured "$kata/configuration.toml" >/etc/kata-containers/configuration.toml
handler kata "$kata/containerd-shim-kata-v2" /etc/kata-containers/configuration.toml >/tmp/handlers.toml
if [[ -e $kata/containerd-shim-kata-v2-rs ]]; then
    configured "$kata/configuration-rs.toml" >/etc/kata-containers/configuration-rs.toml
    handler kata-rs "$kata/containerd-shim-kata-v2-rs" /etc/kata-containers/configuration-rs.toml >>/tmp/handlers.toml
fi
export STACK_HANDLERS=/tmp/handlers.toml
# Both sides boot the same kernel file.
cp "$kata/vmlinux" target/guest/initramfs.cpio /tmp/guest/
export SANDBOXER_GUEST_DIR=/tmp/guest
