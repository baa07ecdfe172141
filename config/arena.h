#pragma once

/*
 * Memory that goes all at once: what a configuration holds lives as long as it
 * does. Nothing is freed alone. All zero is an empty arena.
 */

#include <stddef.h>

struct chunk;

struct arena {
	struct chunk *last;
};

void arena_fini(struct arena *a);

/* Zeroed and aligned for anything; NULL when memory is short. */
void *arena_alloc(struct arena *a, size_t size);

/* A copy of @len bytes with a NUL behind it. */
char *arena_copy(struct arena *a, const char *text, size_t len);
