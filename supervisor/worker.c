#include "supervisor/worker.h"

/* clang-format off */
const struct worker_rule worker_rules[] = {
	{ WORKER_NEW,       WORKER_SPAWNED,     WORKER_RUNNING },
	{ WORKER_NEW,       WORKER_NOT_SPAWNED, WORKER_ENDED },
	{ WORKER_NEW,       WORKER_STOP,        WORKER_ENDED },
	{ WORKER_RUNNING,   WORKER_STOP,        WORKER_STOPPING },
	{ WORKER_RUNNING,   WORKER_EXIT,        WORKER_ENDED },
	{ WORKER_RUNNING,   WORKER_EXIT_LEFT,   WORKER_LINGERING },
	{ WORKER_STOPPING,  WORKER_STOP,        WORKER_STOPPING },
	{ WORKER_STOPPING,  WORKER_EXIT,        WORKER_ENDED },
	{ WORKER_STOPPING,  WORKER_EXIT_LEFT,   WORKER_LINGERING },
	{ WORKER_LINGERING, WORKER_STOP,        WORKER_LINGERING },
	{ WORKER_LINGERING, WORKER_GROUP_GONE,  WORKER_ENDED },
};
/* clang-format on */
const int n_worker_rules = sizeof(worker_rules) / sizeof(worker_rules[0]);

enum worker_state worker_next(enum worker_state from, enum worker_event event)
{
	for (int i = 0; i < n_worker_rules; i++)
		if (worker_rules[i].from == from && worker_rules[i].event == event)
			return worker_rules[i].to;
	return from;
}
