#pragma once

/*
 * The agent of a node: starts its workers, watches them, keeps their output,
 * and takes their whole process trees down. It decides nothing; the coordinator
 * at the other end of its link does.
 */

#include "supervisor/control.h"
#include "supervisor/spawn.h"

struct agent;
struct err;
struct keeper_board;
struct link;
struct loop;

/* @on_status answers "accel status"; @board tells the keeper what to remove
 * should we die. All of them outlive the agent. */
int agent_new(struct agent **ret, struct loop *loop, struct link *coordinator,
	      const struct inherited *inherited, struct keeper_board *board,
	      int (*on_status)(void *data, struct msg_status *ret), void *status_data,
	      struct err *err);
struct agent *agent_free(struct agent *a);
