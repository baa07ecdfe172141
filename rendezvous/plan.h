#pragma once

/*
 * The plan of a job: what the client decided, as coordinator and agents keep
 * it. Owns what msg_plan only borrows.
 */

#include "base/strv.h"
#include "rendezvous/messages.h"

struct err;

struct plan {
	char *job, *job_dir, *socket, *program, *path;
	struct strv argv, env;
	uint32_t n_processes, flags;
	char *mixed_precision, *master_addr;
	uint32_t master_port, grace_ms, lost_grace_ms;
};

enum { MAX_PROCESSES = 65536 };

/* Copy and check. -EINVAL says what is wrong, -ENOMEM. On failure @p is empty. */
int plan_init(struct plan *p, const struct msg_plan *msg, struct err *err);
void plan_fini(struct plan *p);
