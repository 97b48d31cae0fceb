# shellcheck shell=bash
# Run in a container whose init is systemd.
soon systemctl show-environment
systemctl is-system-running --wait || :
systemctl --failed --no-legend --plain | cut -d' ' -f1
systemctl is-active dbus cron systemd-journald
systemd-run -q --wait --pipe -p MemoryMax=64M -p DynamicUser=yes -p PrivateTmp=yes sh -c 'test "$(id -u)" -gt 1000 && echo a service of its own'
systemd-run -q --wait -p Restart=no sh -c 'exit 9' || echo "exit $?"
systemd-run -q --on-active=1 touch /run/by-timer && soon test -e /run/by-timer && echo a timer
systemctl kill cron && soon sh -c '! systemctl is-active cron' && systemctl restart cron && systemctl is-active cron
journalctl -q -n 1 -u cron -o cat | grep -c .
