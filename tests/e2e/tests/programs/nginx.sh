# shellcheck shell=bash
mkdir site
head -c 300000 /dev/zero | tr '\0' x >site/file
cat >nginx.conf <<'END'
pid /tmp/nginx.pid; error_log /tmp/error.log; worker_processes 2;
events {}
http {
    access_log off; sendfile on; aio threads;
    client_body_temp_path /tmp/b; proxy_temp_path /tmp/p; fastcgi_temp_path /tmp/f; uwsgi_temp_path /tmp/u; scgi_temp_path /tmp/s;
    server { listen 80 reuseport; root /tmp/site; }
    server { listen 8080; location / { proxy_pass http://127.0.0.1:80; } }
}
END
id -u
nginx -c /tmp/nginx.conf 2>&1
soon curl -sf -o /dev/null http://127.0.0.1:8080/file
curl -s http://127.0.0.1:8080/file | sha256sum
curl -s -r 100-199 http://127.0.0.1/file | wc -c
nginx -c /tmp/nginx.conf -s reload
soon curl -sf -o /dev/null http://127.0.0.1/file
nginx -c /tmp/nginx.conf -s quit
soon test ! -e /tmp/nginx.pid
