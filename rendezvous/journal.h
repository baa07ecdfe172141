#pragma once

/*
 * A job on disk, as the coordinator keeps it in the job's folder: plan.json
 * (without the environment), events.jsonl, report.json. The workers' own files
 * are the agents' business.
 */

#include <stdint.h>

#include "rendezvous/messages.h"
#include "rendezvous/plan.h"

struct err;
struct journal;

/* Open events.jsonl in the job's folder. */
int journal_new(struct journal **ret, const struct plan *plan, struct err *err);

/* Write plan.json. */
int journal_plan(struct journal *j, const struct plan *plan, struct err *err);

/* Write what is queued and close. */
struct journal *journal_free(struct journal *j);

/* Queue one line of events.jsonl: the fields of the message, by their names. A
 * disk that is full costs lines, never the job; journal_error() tells. */
void journal_event(struct journal *j, const char *event, unsigned type, const void *msg);

/* Write the queued lines. */
void journal_flush(struct journal *j);

/* What went wrong first, or NULL. */
const char *journal_error(const struct journal *j);

/* How one worker ended. */
struct journal_worker {
	uint32_t pid;
	int32_t status, exec_errno;
	uint32_t flags;    /* EXIT_... */
	uint64_t ended_us; /* 0: never started */
};

/* Write report.json. */
int journal_report(struct journal *j, const struct plan *plan,
		   const struct msg_verdict *verdict,
		   const struct journal_worker *workers, uint32_t n_workers,
		   struct err *err);
