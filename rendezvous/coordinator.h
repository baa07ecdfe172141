#pragma once

/*
 * The coordinator of a job: takes the plan, serves the key-value store, tells
 * the agents what to do, gathers what they report, and reaches the verdict. It
 * starts no process and sees none; everything comes and goes through links.
 */

#include <stdint.h>

#include "rendezvous/messages.h"

struct coordinator;
struct err;
struct link;
struct loop;

/* Called once, when the job is over here and the client has been told (or is
 * gone). */
typedef void on_over_fn(void *data, uint32_t exit_code);

/* The links stay the caller's and outlive the coordinator. */
int coordinator_new(struct coordinator **ret, struct loop *loop, struct link *client,
		    struct link *agent, on_over_fn *fn, void *data, struct err *err);
struct coordinator *coordinator_free(struct coordinator *c);

/* Somebody asked for the job's end by a signal to this process: as if the client
 * had got it. */
void coordinator_stop(struct coordinator *c, int signo);

/* Something the job cannot do without is gone (@what, for the user): end it. */
void coordinator_lost(struct coordinator *c, const char *what);

/* What the job is doing; slices live as long as the coordinator. -EAGAIN before
 * there is a plan. */
int coordinator_status(const struct coordinator *c, struct msg_status *ret);
