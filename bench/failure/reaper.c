/*
 * The least a launcher can do about a failure: start N workers, block until the
 * first of them ends, and at once send SIGTERM to all others. No output to keep,
 * nobody to tell, nothing to decide. What this takes is the kernel's share, and
 * the benchmark of failing measures the others against it.
 *
 * usage: reaper N PROGRAM [ARGUMENTS]
 */

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N_MAX = 1 << 16 };

static int start_all(pid_t *pids, long n, char **argv)
{
	char text[24];

	(void)snprintf(text, sizeof(text), "%ld", n);
	(void)setenv("WORLD_SIZE", text, 1);
	for (long i = 0; i < n; i++) {
		int e;

		(void)snprintf(text, sizeof(text), "%ld", i);
		(void)setenv("RANK", text, 1);
		e = posix_spawnp(&pids[i], argv[0], NULL, NULL, argv, environ);
		if (e) {
			fprintf(stderr, "reaper: start %s: %s\n", argv[0], strerror(e));
			return -1;
		}
	}
	return 0;
}

/* Returns the code of the first to end, which stands for the job. */
static int end_with_the_first(const pid_t *pids, long n)
{
	int status = 0;
	pid_t first = wait(&status);

	for (long i = 0; i < n; i++)
		if (pids[i] != first)
			(void)kill(pids[i], SIGTERM);
	while (wait(NULL) > 0 || errno == EINTR)
		;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int main(int argc, char **argv)
{
	char *end = NULL;
	long n = argc > 2 ? strtol(argv[1], &end, 10) : 0;
	pid_t *pids;
	int code = 70;

	if (n < 1 || n > N_MAX || *end) {
		fprintf(stderr, "usage: reaper N PROGRAM [ARGUMENTS]\n");
		return 2;
	}
	pids = calloc((size_t)n, sizeof(*pids));
	if (pids && !start_all(pids, n, argv + 2))
		code = end_with_the_first(pids, n);
	free(pids);
	return code;
}
