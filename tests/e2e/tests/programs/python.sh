# shellcheck shell=bash
python3 -m venv /tmp/venv
/tmp/venv/bin/pip --version | cut -d' ' -f1
mkdir www
cat >work.py <<'END'
import multiprocessing, sqlite3, threading
base = sqlite3.connect("/tmp/www/base.db")
base.execute("pragma journal_mode=wal")
base.execute("create table t (n integer primary key, square integer)")
def square(n): return n, n * n
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        base.executemany("insert into t values (?, ?)", pool.map(square, range(500)))
    base.commit()
    print(base.execute("select count(*), sum(square) from t").fetchone())
    lock, seen = threading.Lock(), []
    threads = [threading.Thread(target=lambda n=n: seen.append(n)) for n in range(20)]
    [t.start() for t in threads]; [t.join() for t in threads]
    print(len(seen))
END
/tmp/venv/bin/python work.py
/tmp/venv/bin/python -m http.server --directory /tmp/www --bind 127.0.0.1 8000 >&2 &
soon curl -sf -o /tmp/got http://127.0.0.1:8000/base.db
cmp /tmp/got /tmp/www/base.db && echo same
