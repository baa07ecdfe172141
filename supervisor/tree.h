#pragma once

/*
 * The processes below us. acceld is a subreaper, so whatever a worker leaves
 * behind, however it detached itself, becomes our own child in the end; and a
 * pid that is our unreaped child cannot have been given to anyone else.
 */

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* Called for each of our direct children. */
typedef void on_child_fn(void *data, pid_t pid);

/* List them. Returns how many, or -errno where /proc does not tell. */
int tree_children(on_child_fn *fn, void *data);

/* SIGKILL every direct child with its process group. Their own children are
 * ours the moment after: call again until no child is left. Returns as
 * tree_children() does. */
int tree_kill_children(void);

/* Reap children that have ended until none is left, killing all the while. */
void tree_kill_all(void);

/* True when we have no child at all, dead or alive. */
bool tree_is_empty(void);
