#include "supervisor/keeper.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "supervisor/cgroup.h"
#include "supervisor/control.h"
#include "supervisor/tree.h"

/* How long a daemon may go on without its client. */
enum { STUCK_MS = 10000 };

static int exit_code_of(int status)
{
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Wait for the other side of @fd to close: the daemon's death, or the client's. */
static bool is_closed(int fd, int timeout_ms)
{
	struct pollfd p = { .fd = fd, .events = POLLRDHUP };

	return poll(&p, 1, timeout_ms) > 0;
}

static void wait_for_either(int daemon_fd, int link_fd)
{
	struct pollfd p[] = { { .fd = daemon_fd, .events = POLLRDHUP },
			      { .fd = link_fd, .events = POLLRDHUP } };

	while (poll(p, 2, -1) < 0 && errno == EINTR)
		;
}

/*
 * The daemon ends the job when its client is gone, and itself with it. One that
 * does not is stuck, and nobody else will ever end it.
 */
static int wait_for(pid_t daemon, int daemon_fd, int link_fd)
{
	int status = 0;

	wait_for_either(daemon_fd, link_fd);
	if (!is_closed(daemon_fd, STUCK_MS))
		(void)kill(daemon, SIGKILL);
	while (waitpid(daemon, &status, 0) < 0 && errno == EINTR)
		;
	return exit_code_of(status);
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

static _Noreturn void keep(pid_t daemon, int daemon_fd, int link_fd,
			   const struct keeper_board *board)
{
	int code = wait_for(daemon, daemon_fd, link_fd);

	clean_up(board);
	_exit(code);
}

int keeper_start(int link_fd, struct keeper_board **ret_board)
{
	struct keeper_board *board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE,
					  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int ends[2]; /* each side sees the other's death */
	pid_t pid;

	if (board == MAP_FAILED ||
	    socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
		return -errno;
	/* Both are subreapers: orphans go to the daemon, and to us after it. */
	(void)prctl(PR_SET_CHILD_SUBREAPER, 1);
	pid = fork();
	if (pid < 0)
		return -errno;
	if (pid > 0) {
		(void)close(ends[1]);
		keep(pid, ends[0], link_fd, board);
	}
	(void)prctl(PR_SET_CHILD_SUBREAPER, 1);
	(void)close(ends[0]);
	*ret_board = board;
	return ends[1];
}
