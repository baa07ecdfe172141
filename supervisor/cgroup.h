#pragma once

/*
 * A cgroup (v2) of the job's own, where we may make one: its "cgroup.kill"
 * takes down everything in it at one stroke, however it forks. Needs no
 * controllers. Where there is none, the process tree is walked instead.
 */

#include <stddef.h>

/* Make a cgroup called @name below our own and put its path in @out ("" where
 * that cannot be). Returns an open descriptor of it (CLOEXEC), or -errno. */
int cgroup_new(char *out, size_t size, const char *name);

/* SIGKILL to everything in it, if it exists. */
void cgroup_kill(const char *path);

/* The same and cgroup_remove() for the cgroup called @name below our own, for
 * whoever finds that a job's supervisor is no more. */
void cgroup_sweep(const char *name);

/* Remove it; it must be empty. */
void cgroup_remove(const char *path);
