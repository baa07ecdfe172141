#pragma once

/*
 * The keeper: parent of the daemon. It only waits. When the daemon dies,
 * whatever was below it falls to the keeper, which kills until it has no
 * children left and removes what the daemon had on its board. A daemon that
 * goes on long after its client is gone is stuck, and is killed.
 */

#include <limits.h>

/* Shared memory: what exists outside the daemon and must not outlive it. The
 * daemon writes an entry before it makes the thing. */
struct keeper_board {
	char socket[108];
	char cgroup[PATH_MAX];
};

/*
 * Fork the daemon. In the daemon it returns the descriptor that becomes
 * readable when the keeper dies, with *@ret_board set. The keeper never
 * returns: it exits with the daemon's exit code, or 128 + signal.
 */
int keeper_start(int link_fd, struct keeper_board **ret_board);
