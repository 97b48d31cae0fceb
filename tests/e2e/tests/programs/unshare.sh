# shellcheck shell=bash
unshare -pf --mount-proc sh -c 'set -- $$ /proc/[0-9]*; echo $*'
unshare -n sh -c 'ip -o link | wc -l; ip link set lo up; ip -o addr show lo | grep -c inet'
unshare -u sh -c 'hostname other; hostname'; hostname | grep -c other || :
unshare -m sh -c 'mount -t tmpfs none /mnt; touch /mnt/x; ls /mnt'; ls /mnt | wc -l
unshare -i ipcmk -M 100 | cut -d: -f1
unshare -C cat /proc/self/cgroup | grep -c ':/$' | sed 's/^[1-9].*/own group/'
unshare -T --boottime 1000000 sh -c 'test "$(cut -d. -f1 /proc/uptime)" -gt 1000000 && echo later'
setpriv --reuid 1000 --regid 1000 --clear-groups unshare -Urmpf --mount-proc sh -c 'id -u; cat /proc/self/uid_map; mount -t tmpfs none /mnt && echo mounted'
# Another network than the pod's.
ip netns add one && ip link add v0 type veth peer name v1 netns one && ip addr add 203.0.113.1/24 dev v0 && ip link set v0 up
ip -n one addr add 203.0.113.2/24 dev v1 && ip -n one link set v1 up && ip -n one link set lo up
ip netns exec one curl -s --connect-timeout 30 http://203.0.113.1:9/ || echo "curl: $?"
ip -n one neigh show 203.0.113.1 | grep -c lladdr
ip netns del one
