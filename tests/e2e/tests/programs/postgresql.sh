# shellcheck shell=bash
bin=$(echo /usr/lib/postgresql/*/bin)
as() { setpriv --reuid postgres --regid postgres --init-groups "$@"; }
export PGDATA=/var/lib/postgresql/data PGHOST=/tmp
stat -c %U $PGDATA
as "$bin/initdb" -A trust -N >&2
as "$bin/pg_ctl" -w -t 120 -o '-k /tmp -c listen_addresses=127.0.0.1' -l /tmp/log start >&2
as psql -qAt postgres <<'END'
create table t (n int primary key, text text);
insert into t select n, repeat('x', n % 50) from generate_series(1, 5000) n;
create index on t (text);
select count(*), sum(length(text)) from t;
set max_parallel_workers_per_gather = 2; set parallel_setup_cost = 0; set parallel_tuple_cost = 0; set min_parallel_table_scan_size = 0;
select count(*) from t a join t b on a.n = b.n where a.text <> 'y';
vacuum full analyze t;
END
as "$bin/pg_ctl" -w -m immediate stop >&2
as "$bin/pg_ctl" -w -t 120 -o '-k /tmp' -l /tmp/log start >&2
as psql -qAt -h 127.0.0.1 postgres -c 'select max(n) from t'
as "$bin/pg_ctl" -w -m fast stop | tail -n 1
