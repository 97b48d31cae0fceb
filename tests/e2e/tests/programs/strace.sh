# shellcheck shell=bash
strace -f -o trace -e trace=execve,openat,clone,clone3,vfork sh -c 'cat /etc/hostname | wc -l'
grep -c 'execve("/usr/bin/cat"' trace
grep -c 'openat(AT_FDCWD, "/etc/hostname"' trace
while :; do sleep 0.2; done &
timeout 10 strace -f -o attached -p $! 2>/dev/null || echo "ended with $?"
grep -q execve attached && echo attached
strace -e inject=openat:error=EACCES:when=1+ cat /etc/hostname >/dev/null 2>refused || echo "refused with $?"
grep -q INJECTED refused && echo injected
strace -c -o count true && tail -n 1 count | grep -o total
