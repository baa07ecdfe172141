#pragma once

/* The one monotonic clock, and wall time for what people read. */

#include <stdint.h>
#include <time.h>

static inline uint64_t clock_us(clockid_t which)
{
	struct timespec t;

	(void)clock_gettime(which, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static inline uint64_t now_us(void)
{
	return clock_us(CLOCK_MONOTONIC);
}

static inline uint64_t now_ms(void)
{
	return now_us() / 1000;
}

/* Microseconds since 1970. */
static inline uint64_t wall_us(void)
{
	return clock_us(CLOCK_REALTIME);
}
