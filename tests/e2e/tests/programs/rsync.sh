# shellcheck shell=bash
mkdir -p /run/sshd /root/.ssh
ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
printf 'Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n  Port 2222\n' >/root/.ssh/config
/usr/sbin/sshd -p 2222 -o ListenAddress=127.0.0.1
soon ssh 127.0.0.1 true
mkdir -p from/deep/er to
for n in $(seq 200); do echo "$n" >"from/deep/$n"; done
head -c 3000000 /dev/urandom >from/large
ln from/large from/again
ln -s deep/7 from/link
truncate -s 5M from/sparse
chown 1234:5678 from/deep/1 && chmod 4711 from/deep/2
rsync -aHSX --numeric-ids from/ 127.0.0.1:/tmp/to/
diff -r from to && echo same
stat -c '%n %a %u:%g %h' to/large to/link to/deep/1 to/deep/2
echo more >>from/large && rm from/deep/3
rsync -aH --delete --stats from/ 127.0.0.1:/tmp/to/ | grep -E 'Number of (deleted|regular) files'
diff -r from to && echo same
