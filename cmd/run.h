#pragma once

/* One job from the client's side: starts acceld, hands it the plan, shows what
 * comes, passes signals on, and ends with the verdict. */

#include <stdbool.h>
#include <stdint.h>

#include "rendezvous/messages.h"

struct run_options {
	const char *acceld; /* its path */
	const char *job, *job_dir, *socket;
	const char *path; /* the program's file, for messages */
	uint32_t n_processes;
	uint32_t grace_ms;
	bool verbose;
};

enum {
	RUN_REFUSED =
		-1, /* nothing was started; *@ret_refused_code says what to exit with */
};

/* Run the job of @plan. Returns the exit code, or RUN_REFUSED. */
int run_job(const struct run_options *o, const struct msg_plan *plan,
	    int *ret_refused_code);

/* Find acceld beside the accel being run, or where it is installed. The caller
 * frees. */
struct err;
int run_find_acceld(char **ret, struct err *err);
