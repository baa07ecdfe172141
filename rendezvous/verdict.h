#pragma once

/*
 * What went wrong first. Pure: reports of workers in, a verdict out.
 *
 * When one worker dies, the others soon follow with errors of their own, so the
 * order in which exits are seen is not enough. Failures count by the time at
 * which the program itself wrote its error file, else the moment its exit was
 * seen; within 100 ms of each other a signal (a crash) comes before a program
 * that could not be executed, and that before an exit code.
 */

#include <stdbool.h>
#include <stddef.h>

#include "rendezvous/messages.h"

struct failure {
	bool known;
	struct msg_exited exited; /* slices into the strings below */
	char *message, *tail, *tail_path;
};

void failure_fini(struct failure *f);

/* Did this worker fail by itself? Not if it succeeded, nor if it ended because
 * the supervisor told it to; unless it had written its error file before the
 * job was stopped at @stopped_us (0: it was not). */
bool verdict_is_failure(const struct msg_exited *e, uint64_t stopped_us);

/* Keep the earlier of the two. */
void failure_consider(struct failure *f, const struct msg_exited *e);

/* Fill in how the job ended. @stop_reason: the signal that asked for the stop, or 0.
 * Slices point into @f. */
void verdict_reach(struct msg_verdict *v, const struct failure *f, uint32_t stop_reason,
		   bool lost);

/* "exited with code 3", "was killed by SIGSEGV", "could not be executed: ...". */
void verdict_describe(char *out, size_t size, int32_t status, int32_t exec_errno);
