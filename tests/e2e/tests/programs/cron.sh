# shellcheck shell=bash
echo 'echo "$(id -un) $PWD" >/tmp/ran' >/tmp/job
chmod 755 /tmp/job
printf '* * * * * sh /tmp/job\n' | crontab -u nobody -
touch /tmp/ran && chown nobody /tmp/ran
cron
soon test -s /tmp/ran
cat /tmp/ran
