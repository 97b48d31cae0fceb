# shellcheck shell=bash
mkdir -p /run/sshd /root/.ssh
chmod 700 /root/.ssh
ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
printf 'Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n  Port 2222\n' >/root/.ssh/config
/usr/sbin/sshd -p 2222 -o ListenAddress=127.0.0.1
soon ssh 127.0.0.1 true
ssh 127.0.0.1 'id -u; exit 7' || echo "exit $?"
ssh -tt 127.0.0.1 'tty | cut -d/ -f1-3' </dev/null | tr -d '\r'
ssh -f -N -L 127.0.0.1:3333:127.0.0.1:2222 127.0.0.1
soon ssh -p 3333 127.0.0.1 true && echo forwarded
