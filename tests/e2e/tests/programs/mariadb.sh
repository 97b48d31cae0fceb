# shellcheck shell=bash
useradd -r mysql
chown mysql: /var/lib/mysql
mkdir -p /run/mysqld && chown mysql: /run/mysqld
mariadb-install-db --user=mysql --datadir=/var/lib/mysql --auth-root-authentication-method=normal --skip-test-db >&2
mariadbd --user=mysql --datadir=/var/lib/mysql --socket=/run/mysqld/mysqld.sock --bind-address=127.0.0.1 >&2 &
soon mariadb -e 'select 1'
mariadb -N -e "create database d; use d; create table t (n int primary key, text varchar(60)) engine=innodb;
insert into t select seq, repeat('x', seq % 50) from seq_1_to_2000;
select count(*), sum(length(text)) from t; start transaction; delete from t where n > 10; rollback; select count(*) from t; check table t"
mariadb -e shutdown
wait
echo "ended with $?"
