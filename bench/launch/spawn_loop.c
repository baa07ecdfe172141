/*
 * The least a launcher can do: posix_spawn a program N times, wait for all of
 * them. No environment of its own, no output to keep, nothing to clean up. The
 * benchmark of launching measures the others against it.
 *
 * usage: spawn_loop N PROGRAM [ARGUMENTS]
 */

#include <errno.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N_MAX = 1 << 16 };

/* Returns how many were started. */
static long spawn_all(long n, char **argv)
{
	for (long i = 0; i < n; i++) {
		pid_t pid;
		int e = posix_spawnp(&pid, argv[0], NULL, NULL, argv, environ);

		if (e) {
			fprintf(stderr, "spawn_loop: start %s: %s\n", argv[0],
				strerror(e));
			return i;
		}
	}
	return n;
}

/* Returns how many children ended with 0. */
static long wait_all(void)
{
	long n_good = 0;

	for (;;) {
		int status;

		if (wait(&status) < 0) {
			if (errno == EINTR)
				continue;
			return n_good;
		}
		n_good += WIFEXITED(status) && !WEXITSTATUS(status);
	}
}

int main(int argc, char **argv)
{
	char *end = NULL;
	long n = argc > 2 ? strtol(argv[1], &end, 10) : 0;
	long n_started;

	if (n < 1 || n > N_MAX || *end) {
		fprintf(stderr, "usage: spawn_loop N PROGRAM [ARGUMENTS]\n");
		return 2;
	}
	n_started = spawn_all(n, argv + 2);
	return wait_all() == n && n_started == n ? 0 : 1;
}
