#pragma once

/* Where a job keeps its files and its control socket, and how jobs are named. */

#include <stdbool.h>

struct err;
struct strv;

struct jobdir {
	char id[32];   /* "20260131-235959-x7k2" */
	char *dir;     /* absolute, exists, ours, 0700 */
	char *socket;  /* absolute; its folder exists, ours, 0700 */
	char *created; /* folder of @log_dir, when it was made for this job */
};

/*
 * Make the folder of a new job: in @log_dir, which must work; else below
 * $XDG_STATE_HOME, ~/.local/state or the temporary folder, whichever works
 * first (*@ret_fallback: it was the last).
 */
int jobdir_init(struct jobdir *j, const char *log_dir, bool *ret_fallback,
		struct err *err);

/* Remove what jobdir_init() made: for a job that never started. */
void jobdir_undo(struct jobdir *j);
void jobdir_fini(struct jobdir *j);

/* The folders in which control sockets may lie, best first. */
int jobdir_socket_dirs(struct strv *out);
