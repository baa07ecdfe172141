#pragma once

struct msg_verdict;
struct run_options;
struct screen;

/* The last lines the user sees of a job that did not succeed: which rank failed
 * first, how, and the last it said. Nothing for one that did. */
void verdict_block(struct screen *s, const struct msg_verdict *v,
		   const struct run_options *o);
