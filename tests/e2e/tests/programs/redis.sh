# shellcheck shell=bash
redis-server --daemonize yes --dir /tmp --save '' --appendonly yes --logfile /tmp/redis.log >&2
soon redis-cli ping
redis-cli set key value
redis-cli eval 'for n = 1, 1000 do redis.call("incr", "n") end return redis.call("get", "n")' 0
redis-benchmark -q -n 500 -t set,get >&2
redis-cli bgsave >&2
soon grep -q 'DB saved on disk' /tmp/redis.log
redis-cli shutdown
redis-server --daemonize yes --dir /tmp --save '' --appendonly yes >&2
soon sh -c 'redis-cli get n | grep -qx 1000'
redis-cli get key
