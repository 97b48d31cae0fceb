/* Copies the given number of bytes from its input to its output within the kernel. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    for (long left = atol(argv[1]), some; left > 0; left -= some) {
        some = splice(0, NULL, 1, NULL, left, 0);
        if (some <= 0) { fprintf(stderr, "splice: %ld with %ld left: %m\n", some, left); return 1; }
    }
    return 0;
}
