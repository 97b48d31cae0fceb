/* Stand-in for the pause image that runc's pods need: waits, reaps, ends when told. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int sig) { _exit(128 + sig); }
static void reap(int sig) { (void)sig; while (waitpid(-1, 0, WNOHANG) > 0); }

int main(void) {
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
