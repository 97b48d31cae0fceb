# shellcheck shell=bash
cat >crash.c <<'END'
#include <pthread.h>
#include <unistd.h>
int seen;
int deepest(int *p) { seen++; return *p; }
int middle(int *p) { return deepest(p) + 1; }
int main(int argc, char **argv) {
    if (argc > 1) for (;;) { seen++; sleep(1); }
    return middle(0);
}
END
gcc -g -O0 -pthread -o crash crash.c
gdb -nx -batch -ex run -ex bt -ex 'print seen' ./crash 2>/dev/null | grep -E 'SIGSEGV|^#|^\$' | sed -E 's/0x[0-9a-f]+ in //; s/argv=0x[0-9a-f]+/argv/'
gdb -nx -batch -ex 'break middle' -ex run -ex 'watch seen' -ex continue -ex kill ./crash 2>/dev/null | grep -E '^(Hardware|Old|New)'
./crash wait &
pid=$!
sleep 1
gdb -nx -batch -p $pid -ex bt -ex 'set var seen = 1000' -ex detach 2>/dev/null | grep -o 'main (argc=2'
gdb -nx -batch -p $pid -ex "gcore /tmp/core" 2>/dev/null | grep -o 'Saved corefile'
gdb -nx -batch -ex 'print seen >= 1000' ./crash /tmp/core 2>/dev/null | grep '^\$'
