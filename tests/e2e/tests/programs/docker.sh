# shellcheck shell=bash
# As Docker's own image does: with control groups v2, the processes move out of the way of the controllers.
if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
    mkdir -p /sys/fs/cgroup/init
    xargs -rn1 </sys/fs/cgroup/cgroup.procs >/sys/fs/cgroup/init/cgroup.procs 2>/dev/null || :
    sed -e 's/ / +/g' -e 's/^/+/' </sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
fi
mount -t tmpfs none /run
trap 'tail -n 20 /var/log/docker.log >&2; /etc/init.d/docker stop >/dev/null 2>&1' EXIT
# Its script mounts each hierarchy of control groups of version 1 that the node has not, and the node then keeps it. Beside a line like
# this one it leaves them alone.
echo 'none /sys/fs/cgroup cgroup defaults 0 0' >>/etc/fstab
# A container of a node that may not raise its limits cannot, either.
sed -i 's/ulimit -.*/:/' /etc/init.d/docker
# As containerd.service does: Docker's daemon gives a containerd of its own 15 s to start, which are too few for an emulated guest.
containerd >/var/log/docker-containerd.log 2>&1 &
soon ctr version
/etc/init.d/docker start >&2
soon docker info
docker info -f '{{.Driver}}'
mkdir context && cp /bin/busybox context/
printf 'FROM scratch\nCOPY busybox /bin/busybox\nRUN ["/bin/busybox", "--install", "-s", "/bin"]\nRUN mkdir /www && echo built >/www/index.html\nCMD ["httpd", "-f", "-p", "80", "-h", "/www"]\n' >context/Dockerfile
docker build -q -t web context >/dev/null
docker run --rm web cat /www/index.html
docker run --rm -m 32m web sh -c 'cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes'
docker run --name greedy -m 16m --memory-swap 16m web sh -c 'dd if=/dev/zero of=/dev/null bs=64M count=1' >/dev/null 2>&1 || echo "exit $?"
docker inspect -f '{{.State.OOMKilled}}' greedy
docker run -d -p 8080:80 --name served web >/dev/null
soon curl -sf http://127.0.0.1:8080/
curl -s http://127.0.0.1:8080/
curl -s "http://$(hostname -I | cut -d' ' -f1):8080/"
docker exec served sh -c 'echo by exec'
docker run --rm --link served web wget -qO- http://served/
docker stop -t 1 served >/dev/null && docker inspect -f '{{.State.Status}}' served
docker run --rm --read-only --cap-drop ALL --user 1000 web id -u
