#pragma once

/* The daemon: coordinator and agent of a job in one loop, driven over @link_fd.
 * @keeper_fd becomes readable when the keeper dies. Returns the exit code. */

struct inherited;
struct keeper_board;

int daemon_run(int link_fd, int keeper_fd, struct keeper_board *board,
	       const struct inherited *inherited);
