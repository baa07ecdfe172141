#pragma once

/*
 * What the agent's parts share: agent.c (its messages and its life),
 * agent_start.c (bringing workers up), agent_stop.c (how they end, and taking
 * down what is left).
 */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/page.h"
#include "base/strv.h"
#include "detect/detect.h"
#include "rendezvous/messages.h"
#include "rendezvous/plan.h"
#include "supervisor/agent.h"
#include "supervisor/output.h"
#include "supervisor/worker.h"

struct worker {
	struct agent *agent;
	uint32_t rank;
	enum worker_state state;
	pid_t pid;
	int pidfd, page_fd;
	uint64_t page_inode;
	struct watch *exit_watch;
	struct output outputs[N_STREAMS];
	bool started;   /* outputs are in use */
	bool signalled; /* we told it to end */

	/* Between its death and its burial (agent_bury()). */
	bool reaped;
	int status;
	bool was_signalled; /* when it died */
	uint64_t ended_us;
	struct worker *next_reaped;

	uint64_t group_kill_at_ms; /* while lingering */
};

/* Processes of the job that no worker leads any more. */
struct leftovers {
	pid_t *told; /* have had their SIGTERM */
	size_t n_told, cap;
	uint32_t n_seen; /* in the last look */
};

struct agent {
	struct loop *loop;
	struct link *coordinator;
	const struct inherited *inherited;
	struct keeper_board *board;
	int (*on_status)(void *data, struct msg_status *ret);
	void *status_data;

	struct plan plan;
	struct msg_start start;
	char *attempt_dir;
	struct devices devices;
	int n_cores;
	struct strv base_env; /* the user's, less what describes another job */
	uint8_t nonce[NONCE_SIZE];
	int ring_fd; /* of this node's workers; -1 where there is none */
	uint64_t ring_inode;
	struct control *control;
	int cgroup_fd;
	int stdin_fd;

	struct worker *workers;
	uint32_t n_workers, n_spawned, n_alive, n_lingering;
	struct worker *reaped, **reaped_end; /* dead and not buried, in order */
	int *exec_errnos;                    /* shared with the children */
	bool want_pidfds;
	struct timer *spawn_timer;
	struct sigwatch *sigchld;
	struct prelude *prelude;
	bool reap_wanted, holding;

	/* Taking things down. */
	struct timer *tick, *patience;
	bool failed;         /* a worker did, by itself */
	int stop_signo;      /* 0: the job runs */
	uint64_t kill_at_ms; /* 0: no limit yet */
	bool killing, sweeping, idle;
	uint32_t n_killed;
	struct leftovers leftovers;
};

/* A line for the user, through the coordinator. */
void agent_tell(struct agent *a, uint32_t level, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

void worker_event(struct worker *w, enum worker_event event);

/* Its main process runs, and may be signalled by its pid. */
static inline bool is_alive(const struct worker *w)
{
	return !w->reaped && (w->state == WORKER_RUNNING || w->state == WORKER_STOPPING);
}

/* agent_start.c */
/* Set a word of its control page. */
void worker_write(struct worker *w, size_t offset, uint32_t value);
int agent_prepare(struct agent *a, struct err *err);
void agent_spawn_some(struct agent *a);

/* agent_stop.c */
void agent_stop(struct agent *a, const struct msg_stop *msg);
/* A child may have ended: look without waiting. */
void worker_reap(struct worker *w);
/* Reap orphans, and workers that have no pidfd. */
void agent_reap(struct agent *a);
/* Report workers that died, with their last words, and give back what they held. */
void agent_bury(struct agent *a);
/* A worker that could not be started. */
void worker_report_unborn(struct worker *w, int error);
/* One look at what is still there, and at the clock. */
void agent_look_after(struct agent *a);
void agent_on_patience(struct agent *a);
