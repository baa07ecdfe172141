#pragma once

/*
 * Ownership by scope.
 *
 * A local that owns something is declared with OWN_* and initialised on the
 * same line. It is released when the scope ends, on every path. To hand the
 * thing on, take() it: the local becomes empty and the value moves out.
 */

#include <stdlib.h>
#include <unistd.h>

#define OWN(fn) __attribute__((cleanup(fn)))
#define OWN_MEM OWN(own_free)
#define OWN_FD OWN(own_close)

#define take(p)                                                                          \
	({                                                                               \
		__typeof__(p) take_val_ = (p);                                           \
		(p) = NULL;                                                              \
		take_val_;                                                               \
	})

/* Declare "void own_NAME(type **)" for use in OWN(own_NAME). */
#define DEFINE_OWN(name, type, release)                                                  \
	static inline void own_##name(type **p)                                          \
	{                                                                                \
		if (*p)                                                                  \
			(void)release(*p);                                               \
	}

static inline void own_free(void *p)
{
	free(*(void **)p);
}

/* Close and forget. A descriptor that is not open is -1. */
static inline void own_close(int *fd)
{
	if (*fd >= 0)
		(void)close(*fd);
	*fd = -1;
}

static inline int take_fd(int *fd)
{
	int val = *fd;

	*fd = -1;
	return val;
}
