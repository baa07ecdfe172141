#include "supervisor/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "supervisor/cgroup.h"
#include "supervisor/control.h"
#include "supervisor/tree.h"

static int exit_code_of(int status)
{
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int wait_for(pid_t daemon)
{
	for (;;) {
		int status;
		pid_t pid = waitpid(-1, &status, 0);

		if (pid == daemon)
			return exit_code_of(status);
		if (pid < 0 && errno != EINTR)
			return 70;
	}
}

/* A daemon that ended properly has left nothing of this. */
static void clean_up(const struct keeper_board *board)
{
	if (board->cgroup[0])
		cgroup_kill(board->cgroup);
	tree_kill_all();
	if (board->cgroup[0])
		cgroup_remove(board->cgroup);
	if (board->socket[0])
		control_remove(board->socket);
}

static _Noreturn void keep(pid_t daemon, const struct keeper_board *board)
{
	int code = wait_for(daemon);

	clean_up(board);
	_exit(code);
}

int keeper_start(int link_fd, struct keeper_board **ret_board)
{
	struct keeper_board *board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE,
					  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int alive[2];
	pid_t pid;

	if (board == MAP_FAILED || pipe2(alive, O_CLOEXEC) < 0)
		return -errno;
	/* Both are subreapers: orphans go to the daemon, and to us after it. */
	(void)prctl(PR_SET_CHILD_SUBREAPER, 1);
	pid = fork();
	if (pid < 0)
		return -errno;
	if (pid > 0) {
		(void)close(link_fd);
		(void)close(alive[0]); /* alive[1] stays open as long as we live */
		keep(pid, board);
	}
	(void)prctl(PR_SET_CHILD_SUBREAPER, 1);
	(void)close(alive[1]);
	*ret_board = board;
	return alive[0];
}
