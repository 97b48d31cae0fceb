# shellcheck shell=bash
if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
    mkdir -p /sys/fs/cgroup/init
    xargs -rn1 </sys/fs/cgroup/cgroup.procs >/sys/fs/cgroup/init/cgroup.procs 2>/dev/null || :
    sed -e 's/ / +/g' -e 's/^/+/' </sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
fi
mount -t tmpfs none /run
mkdir -p /etc/containers context
# With control groups v2, crun raises its limit of locked memory, which a container of a node that may not raise limits cannot.
printf '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "runc"\n' >/etc/containers/containers.conf
printf '{"default": [{"type": "insecureAcceptAnything"}]}\n' >/etc/containers/policy.json
podman info -f '{{.Store.GraphDriverName}}'
mkdir root && mkdir root/bin root/tmp root/etc && cp /bin/busybox root/bin/ && for name in sh cat dd id echo sleep true; do ln -s busybox root/bin/$name; done
tar -C root -c . | podman import -q - local/base >/dev/null
printf 'FROM local/base\nRUN echo built >/etc/built\n' >context/Dockerfile
podman build -q --network none -t web context >/dev/null
podman run --rm --network none web cat /etc/built
podman run --rm --network none -m 16m --memory-swap 16m web dd if=/dev/zero of=/dev/null bs=64M count=1 || echo "exit $?"
podman run -d --network none --name held web sleep 1000 >/dev/null
podman exec held echo by exec
podman stop -t 0 held >/dev/null && podman inspect -f '{{.State.ExitCode}}' held
podman run --rm --network none --user 1000 --cap-drop all web id -u
podman run --rm --network none web sh -c 'exit 5' || echo "exit $?"
