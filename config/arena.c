/* Chunks of memory, chained; see arena.h. */

#include "config/arena.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
	CHUNK = 8192,
	ALIGN = 16,
};

struct chunk {
	struct chunk *before;
	size_t used, size;
	_Alignas(ALIGN) char mem[];
};

void arena_fini(struct arena *a)
{
	while (a->last) {
		struct chunk *before = a->last->before;

		free(a->last);
		a->last = before;
	}
}

void *arena_alloc(struct arena *a, size_t size)
{
	struct chunk *c = a->last;
	void *mem;

	if (size > SIZE_MAX / 2)
		return NULL;
	size = (size + ALIGN - 1) / ALIGN * ALIGN;
	if (!c || c->size - c->used < size) {
		size_t room = size > CHUNK ? size : CHUNK;

		c = calloc(1, sizeof(*c) + room);
		if (!c)
			return NULL;
		c->size = room;
		c->before = a->last;
		a->last = c;
	}
	mem = c->mem + c->used;
	c->used += size;
	return mem;
}

char *arena_copy(struct arena *a, const char *text, size_t len)
{
	char *mem = arena_alloc(a, len + 1);

	return mem ? memcpy(mem, text, len) : NULL;
}
