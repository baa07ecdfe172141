#pragma once

/*
 * The life of one worker, as a table: (state, event) -> state. Pure; what is
 * done on the way is the agent's business.
 */

enum worker_state {
	WORKER_NEW, /* not started yet */
	WORKER_RUNNING,
	WORKER_STOPPING,  /* has been told to end */
	WORKER_LINGERING, /* its main process ended, others of its group live on */
	WORKER_ENDED,
	N_WORKER_STATES,
};

enum worker_event {
	WORKER_SPAWNED,
	WORKER_NOT_SPAWNED, /* the kernel would not */
	WORKER_STOP,
	WORKER_EXIT,      /* the main process ended, and nothing of its group is left */
	WORKER_EXIT_LEFT, /* the main process ended, but its group did not */
	WORKER_GROUP_GONE,
	N_WORKER_EVENTS,
};

struct worker_rule {
	enum worker_state from;
	enum worker_event event;
	enum worker_state to;
};

extern const struct worker_rule worker_rules[];
extern const int n_worker_rules;

/* The next state; the same one where the table has no row. */
enum worker_state worker_next(enum worker_state from, enum worker_event event);
