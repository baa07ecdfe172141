/*
 * acceld: the supervisor of one job on one node. People start it through
 * "accel launch"; it takes its orders over the descriptor it is given.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/opt.h"
#include "base/path.h"
#include "supervisor/daemon.h"
#include "supervisor/keeper.h"
#include "supervisor/spawn.h"

static const char usage[] =
	"acceld " ACCEL_VERSION ": supervisor of one accel job on this node\n"
	"\n"
	"usage: acceld --link FD\n"
	"\n"
	"FD is a connected stream socket on which a client speaks accel's framed\n"
	"protocol. \"accel launch\" starts acceld by itself; nobody else needs to.\n";

static int parse_link(int argc, char **argv)
{
	long long fd;
	struct stat st;

	if (argc != 3 || strcmp(argv[1], "--link") ||
	    parse_int(&fd, argv[2], 3, 1 << 20) < 0)
		return -EINVAL;
	if (fstat((int)fd, &st) < 0 || !S_ISSOCK(st.st_mode))
		return -ENOTSOCK;
	return (int)fd;
}

int main(int argc, char **argv)
{
	struct inherited inherited;
	struct keeper_board *board;
	int link_fd, keeper_fd;

	if (argc == 2 && !strcmp(argv[1], "--version")) {
		puts("acceld " ACCEL_VERSION);
		return 0;
	}
	if (argc == 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))) {
		fputs(usage, stdout);
		return 0;
	}
	fd_open_standard();
	link_fd = parse_link(argc, argv);
	if (link_fd < 0) {
		fputs(link_fd == -ENOTSOCK ? "acceld: the link is not a socket\n" : usage,
		      stderr);
		return 2;
	}
	(void)fcntl(link_fd, F_SETFD, FD_CLOEXEC);
	(void)setsid();
#ifndef __SANITIZE_ADDRESS__
	/* The environment of a job holds secrets; nobody may attach or dump. */
	(void)prctl(PR_SET_DUMPABLE, 0);
#endif
	inherited_init(&inherited);
	keeper_fd = keeper_start(link_fd, &board);
	if (keeper_fd < 0) {
		fprintf(stderr, "acceld: start: %s\n", strerror(-keeper_fd));
		return 70;
	}
	return daemon_run(link_fd, keeper_fd, board, &inherited);
}
