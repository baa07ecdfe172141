#pragma once

/*
 * Starting one process: own session, death signal, descriptors, limits, exact
 * argv and environment, and a pidfd to wait on. No shell, no search.
 */

#include <signal.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/types.h>

struct err;

/* What acceld found when it started and gives back to each worker. */
struct inherited {
	sigset_t mask;         /* signals that were blocked */
	sigset_t ignored;      /* signals that were ignored, as nohup does */
	struct rlimit n_files; /* RLIMIT_NOFILE */
};

/* Note what was inherited, then ignore what would only disturb the supervisor
 * and raise the limit on descriptors. */
void inherited_init(struct inherited *in);

enum { SPAWN_KEEP = 2 };

struct spawn {
	const char *path;
	char *const *argv, *const *env;
	int stdin_fd, stdout_fd, stderr_fd; /* all above 2 */
	int keep_fds[SPAWN_KEEP];           /* stay open under their numbers; or -1 */
	int cgroup_fd;                      /* folder of the cgroup to start in, or -1 */
	const struct inherited *inherited;
	int *exec_errno; /* in shared memory: where a failed exec says why */
};

/*
 * Start it. *@ret_pidfd is -1 where the kernel or a sandbox gives none. A
 * program that cannot be executed is no failure here: its process ends with
 * 127 and *exec_errno is set by then.
 */
int spawn_process(const struct spawn *s, bool want_pidfd, pid_t *ret_pid, int *ret_pidfd,
		  struct err *err);
