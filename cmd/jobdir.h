#pragma once

/* Where a job keeps its files and its control socket, and how jobs are named. */

#include <stdbool.h>

struct err;
struct strv;

struct jobdir {
	char id[32];   /* "20260131-235959-x7k2" */
	char *dir;     /* absolute, exists, ours, 0700 */
	char *socket;  /* absolute; its folder exists, ours, 0700 */
	char *log_dir; /* where it is, if that was made for this job, */
	char *created; /* and the topmost folder that was */
};

/*
 * Make the folder of a new job: in @log_dir, which must work; else below
 * $XDG_STATE_HOME, ~/.local/state or the temporary folder, whichever works
 * first (*@ret_fallback: it was the last). On failure *@ret_hint says what to do.
 */
int jobdir_init(struct jobdir *j, const char *log_dir, bool *ret_fallback,
		const char **ret_hint, struct err *err);

/* Remove what jobdir_init() made: for a job that never started. It is empty after. */
void jobdir_undo(struct jobdir *j);
void jobdir_fini(struct jobdir *j);

/* The folders in which control sockets may lie, best first. */
int jobdir_socket_dirs(struct strv *out);
