/* Prints what a process sees of the trees it is given, one path a line, in an order of its own: type, owner, mode, links, size,
   device, time, access, target, extended attributes and a hash of the content. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

static void text(const char *bytes, ssize_t length) {
    for (ssize_t i = 0; i < length; i++) {
        unsigned char byte = bytes[i];
        if (byte > ' ' && byte < 127 && byte != '\\') putchar(byte);
        else printf("\\x%02x", byte);
    }
}

static void content(const char *path) {
    static unsigned char buffer[1 << 16];
    uint64_t hash = 14695981039346656037u;
    ssize_t got;
    int file = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0) { printf(" unreadable"); return; }
    while ((got = read(file, buffer, sizeof buffer)) > 0)
        for (ssize_t i = 0; i < got; i++) hash = (hash ^ buffer[i]) * 1099511628211u;
    printf(got < 0 ? " unreadable" : " %016" PRIx64, hash);
    close(file);
}

static int by_name(const void *one, const void *other) {
    return strcmp(*(char *const *)one, *(char *const *)other);
}

static void attributes(const char *path) {
    static char names[1 << 16], value[1 << 16];
    char *sorted[256];
    int count = 0;
    ssize_t length = llistxattr(path, names, sizeof names);
    for (ssize_t at = 0; at < length && count < 256; at += strlen(names + at) + 1) sorted[count++] = names + at;
    qsort(sorted, count, sizeof *sorted, by_name);
    for (int i = 0; i < count; i++) {
        ssize_t size = lgetxattr(path, sorted[i], value, sizeof value);
        printf(" %s=", sorted[i]);
        text(value, size);
    }
}

static void look(const char *path, int depth) {
    static const char *const elsewhere[] = { "/proc", "/sys", "/dev" };
    struct stat is;
    for (int i = 0; i < 3; i++) if (!strcmp(path, elsewhere[i])) return;
    text(path, strlen(path));
    if (lstat(path, &is) < 0) { puts(" gone"); return; }
    const char *type = S_ISREG(is.st_mode) ? "file" : S_ISDIR(is.st_mode) ? "dir" : S_ISLNK(is.st_mode) ? "link"
        : S_ISFIFO(is.st_mode) ? "fifo" : S_ISCHR(is.st_mode) ? "char" : S_ISBLK(is.st_mode) ? "block" : "socket";
    printf(" %s %u:%u %o", type, is.st_uid, is.st_gid, is.st_mode & 07777);
    if (!S_ISDIR(is.st_mode)) printf(" links=%lu size=%lld", (unsigned long)is.st_nlink, (long long)is.st_size);
    if (S_ISCHR(is.st_mode) || S_ISBLK(is.st_mode)) printf(" device=%u:%u", major(is.st_rdev), minor(is.st_rdev));
    printf(" time=%lld", (long long)is.st_mtime);
    if (!S_ISLNK(is.st_mode))
        printf(" %s%s%s", access(path, R_OK) ? "-" : "r", access(path, W_OK) ? "-" : "w", access(path, X_OK) ? "-" : "x");
    if (S_ISLNK(is.st_mode)) {
        char target[4096];
        ssize_t length = readlink(path, target, sizeof target);
        printf(" -> ");
        text(target, length);
    }
    attributes(path);
    if (S_ISREG(is.st_mode)) content(path);
    putchar('\n');
    if (!S_ISDIR(is.st_mode) || depth > 12) return;
    struct dirent **entries;
    int count = scandir(path, &entries, NULL, NULL);
    char *names[4096];
    int kept = 0;
    for (int i = 0; i < count && kept < 4096; i++)
        if (strcmp(entries[i]->d_name, ".") && strcmp(entries[i]->d_name, "..")) names[kept++] = entries[i]->d_name;
    qsort(names, kept, sizeof *names, by_name);
    for (int i = 0; i < kept; i++) {
        char *below;
        if (asprintf(&below, "%s/%s", strcmp(path, "/") ? path : "", names[i]) < 0) exit(1);
        look(below, depth + 1);
        free(below);
    }
}

int main(int count, char **paths) {
    char where[4096];
    printf("user %u:%u in %s\n", getuid(), getgid(), getcwd(where, sizeof where) ? where : "?");
    printf("groups");
    gid_t groups[64];
    int n = getgroups(64, groups);
    for (int i = 0; i < n; i++) printf(" %u", groups[i]);
    printf("\nHOME %s\n", getenv("HOME") ? getenv("HOME") : "");
    for (int i = 1; i < count; i++) look(paths[i], 0);
    return 0;
}
