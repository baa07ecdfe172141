#pragma once

/*
 * What a worker sees: the variables of a job, by name and meaning those of
 * torchrun and Accelerate, and our own (DESIGN 4.1).
 */

#include <stdint.h>

#include "base/strv.h"

struct worker_env {
	uint32_t rank, world, local_rank, local_world, node, n_nodes, attempt;
	const char *master_addr;
	uint32_t master_port;
	const char *job;
	const char *mixed_precision;
	const char *device_kind; /* "cuda", ..., "cpu" */
	int n_devices;           /* of that kind; 0 for "cpu" */
	int n_cores;             /* of this node */
	int control_fd;          /* or -1 */
	uint64_t control_inode;
	const char *socket;
	const char *error_file; /* where this rank may write why it failed */
};

/* Append what accel adds, "NAME=value" each, to @out; @user is the environment
 * it is added to, for the variables that are only set where the user has none. */
int env_additions(struct strv *out, const struct worker_env *w, const struct strv *user);
