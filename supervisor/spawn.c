/*
 * The child is a plain copy (clone3 without CLONE_VM): acceld is small and
 * static, so the copy is cheap, the program's image loads on another core
 * while the next worker starts, and an exec on a dead network file system
 * cannot hold the supervisor up.
 */

#include "supervisor/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/err.h"
#include "base/own.h"

/* A terminal's keys and a dying reader are the client's business; a file that grows
 * beyond the user's limit is an error like any other. */
static const int own_ignored[] = { SIGINT,  SIGQUIT, SIGTERM, SIGHUP, SIGPIPE,
				   SIGTSTP, SIGUSR1, SIGUSR2, SIGXFSZ };
enum { N_OWN_IGNORED = sizeof(own_ignored) / sizeof(own_ignored[0]) };

void inherited_init(struct inherited *in)
{
	struct rlimit more;
	sigset_t none;

	/* A supervisor that does not hear of its children would wait for ever. */
	(void)signal(SIGCHLD, SIG_DFL);
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, &in->mask);
	(void)sigemptyset(&in->ignored);
	for (int i = 0; i < N_OWN_IGNORED; i++) {
		struct sigaction old, ignore = { .sa_handler = SIG_IGN };

		(void)sigaction(own_ignored[i], &ignore, &old);
		if (old.sa_handler == SIG_IGN)
			(void)sigaddset(&in->ignored, own_ignored[i]);
	}
	(void)getrlimit(RLIMIT_NOFILE, &in->n_files);
	more = in->n_files;
	more.rlim_cur = more.rlim_max;
	(void)setrlimit(RLIMIT_NOFILE, &more);
}

static void restore_inherited(const struct inherited *in)
{
	for (int i = 0; i < N_OWN_IGNORED; i++)
		if (!sigismember(&in->ignored, own_ignored[i]))
			(void)signal(own_ignored[i], SIG_DFL);
	(void)signal(SIGCHLD, SIG_DFL);
	(void)sigprocmask(SIG_SETMASK, &in->mask, NULL);
	(void)setrlimit(RLIMIT_NOFILE, &in->n_files);
}

/* In the new process. Only system calls. */
static void become(const struct spawn *s, pid_t parent)
{
	(void)setsid();
	/* The parent may have died before the death signal was set. */
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(127);
	if (dup2(s->stdin_fd, 0) < 0 || dup2(s->stdout_fd, 1) < 0 ||
	    dup2(s->stderr_fd, 2) < 0)
		goto failed;
	for (int i = 0; i < SPAWN_KEEP; i++)
		if (s->keep_fds[i] >= 0 && fcntl(s->keep_fds[i], F_SETFD, 0) < 0)
			goto failed;
	restore_inherited(s->inherited);
	(void)execve(s->path, s->argv, s->env);
failed:
	*s->exec_errno = errno;
	_exit(127);
}

static pid_t clone_process(int cgroup_fd, bool want_pidfd, int *ret_pidfd)
{
	struct clone_args args = {
		.exit_signal = SIGCHLD,
		.flags = (want_pidfd ? CLONE_PIDFD : 0) |
			 (cgroup_fd >= 0 ? CLONE_INTO_CGROUP : 0),
		.pidfd = (uintptr_t)ret_pidfd,
		.cgroup = cgroup_fd >= 0 ? (uint64_t)cgroup_fd : 0,
	};

	return (pid_t)syscall(SYS_clone3, &args, sizeof(args));
}

/* Kernels and sandboxes without clone3, pidfds or cgroups still run a job. */
static pid_t fork_process(const struct spawn *s, bool want_pidfd, int *ret_pidfd)
{
	pid_t pid = clone_process(s->cgroup_fd, want_pidfd, ret_pidfd);

	if (pid < 0 && s->cgroup_fd >= 0)
		pid = clone_process(-1, want_pidfd, ret_pidfd);
	if (pid < 0 && errno != EAGAIN && errno != ENOMEM) {
		pid = fork();
		if (pid > 0 && want_pidfd)
			*ret_pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	}
	return pid;
}

int spawn_process(const struct spawn *s, bool want_pidfd, pid_t *ret_pid, int *ret_pidfd,
		  struct err *err)
{
	pid_t parent = getpid(), pid;
	sigset_t all, before;
	int pidfd = -1, saved;

	*s->exec_errno = 0;
	/* A signal that reaches the child while it still ignores what we ignore
	 * would be lost; blocked, it waits until the child is itself. */
	(void)sigfillset(&all);
	(void)sigprocmask(SIG_SETMASK, &all, &before);
	pid = fork_process(s, want_pidfd, &pidfd);
	if (!pid)
		become(s, parent);
	saved = errno;
	(void)sigprocmask(SIG_SETMASK, &before, NULL);
	errno = saved;
	if (pid < 0)
		return err_sys(err, "start a process");
	*ret_pid = pid;
	*ret_pidfd = pidfd;
	return 0;
}
