# shellcheck shell=bash disable=SC2164 # The prelude ends the script at an error.
mkdir src
cd src
for n in $(seq 12); do printf 'int f%d(int x) { return x * %d; }\n' "$n" "$n" >"f$n.c"; done
{
    echo '#include <pthread.h>
#include <stdio.h>'
    for n in $(seq 12); do echo "int f$n(int);"; done
    echo 'static void *run(void *sum) { __atomic_add_fetch((int *)sum, f7(6), 5); return 0; }
int main(void) { int sum = 0; pthread_t t[8];
for (int i = 0; i < 8; i++) pthread_create(t + i, 0, run, &sum);
for (int i = 0; i < 8; i++) pthread_join(t[i], 0);
printf("%d\n", sum + f12(1)); return 0; }'
} >main.c
printf 'all: main\nmain: $(patsubst %%.c,%%.o,$(wildcard *.c))\n\tgcc -pthread -o $@ $^\n%%.o: %%.c\n\tgcc -O2 -pthread -c -o $@ $<\n' >Makefile
make -s -j4
./main
touch f3.c
make -n | wc -l
