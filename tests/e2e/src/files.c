/* Does to a file what programs rely on; prints a line for each. FILE must not exist. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCK 4096

static void said(const char *what, int good) {
    printf("%s %s\n", what, good ? "ok" : strerror(errno ? errno : EIO));
    fflush(stdout);
    errno = 0;
}

int main(int argc, char **argv) {
    if (argc != 2)
        return 2;
    const char *path = argv[1];
    char *block, *seen;
    if (posix_memalign((void **)&block, BLOCK, BLOCK) || posix_memalign((void **)&seen, BLOCK, BLOCK))
        return 2;
    memset(block, 'x', BLOCK);

    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_DIRECT, 0600);
    said("direct open", file >= 0);
    said("direct write", pwrite(file, block, BLOCK, BLOCK) == BLOCK);
    said("direct read", pread(file, seen, BLOCK, BLOCK) == BLOCK && !memcmp(block, seen, BLOCK));
    close(file);

    file = open(path, O_RDWR);
    said("hole", lseek(file, 0, SEEK_HOLE) == 0 && lseek(file, 0, SEEK_DATA) == BLOCK);
    char *memory = mmap(NULL, 2 * BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    said("map", memory != MAP_FAILED);
    if (memory != MAP_FAILED) {
        memory[7] = 'm';
        said("sync", msync(memory, 2 * BLOCK, MS_SYNC) == 0);
        said("mapped", pread(file, seen, 8, 0) == 8 && seen[7] == 'm' && memory[BLOCK] == 'x');
    }

    int appending = open(path, O_WRONLY | O_APPEND);
    said("append", pwrite(file, "y", 1, 2 * BLOCK) == 1 && write(appending, "z", 1) == 1);
    said("appended", pread(file, seen, 2, 2 * BLOCK) == 2 && !memcmp(seen, "yz", 2));

    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 10};
    said("lock", fcntl(file, F_SETLK, &lock) == 0);
    pid_t other = fork();
    if (other == 0)
        _exit(fcntl(open(path, O_RDWR), F_SETLK, &lock) == -1 && (errno == EAGAIN || errno == EACCES) ? 0 : 1);
    int ended = -1;
    said("locked", waitpid(other, &ended, 0) == other && ended == 0);

    struct stat found;
    said("unlink", unlink(path) == 0 && fstat(file, &found) == 0 && found.st_nlink == 0);
    said("still there", pread(file, seen, 1, BLOCK) == 1 && seen[0] == 'x' && ftruncate(file, 5) == 0);
    return 0;
}
