#pragma once

/*
 * Ranks as threads over one ring, and the data that they exchange.
 *
 * A test is a body that every rank runs. cmocka's assertions jump out of a function,
 * which threads must not: a body uses CHECK(), which notes the first failure and goes
 * on, so that no rank leaves the others waiting.
 */

/* Before cmocka, whose fail() is a macro. */
#include "runtime/world.h"

#include "tests/unit/unit.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/own.h"
#include "base/page.h"
#include "tests/unit/dtypes.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum { MAX_RANKS = 8, TEXT = 4096 };

struct ring {
	struct ring_page *page;
	size_t mapped;
	int fd, n_ranks;
};

struct rank {
	accel_world *world;
	int number, size;
	const void *data; /* of the test */
	uint64_t random;  /* another one on each rank */
	char text[TEXT];  /* for tests to compare between ranks, */
	uint64_t digest;  /* as is this, of all data that was checked */
	struct rank *all;
	sem_t waits;     /* posted ten times a second while this rank waits for others */
	int wait_result; /* what the callback for that returns */
	bool is_joined;
	int n_failures;
	char failure[TEXT];
	void (*body)(struct rank *);
	const struct ring *ring;
	pthread_t thread;
};

static _Thread_local struct rank *this_rank;

/* ---- checks in threads ------------------------------------------------------------ */

static inline bool check(struct rank *r, bool is_true, const char *what, int line)
{
	if (!is_true && !r->n_failures++)
		(void)snprintf(r->failure, sizeof(r->failure),
			       "rank %d of %d, line %d: %s (last error: %.1000s)",
			       r->number, r->size, line, what, accel_error());
	return is_true;
}

static inline bool check_code(struct rank *r, int code, int want, const char *what,
			      int line)
{
	char text[512];

	(void)snprintf(text, sizeof(text), "%s is %d instead of %d", what, code, want);
	return check(r, code == want, text, line);
}

#define CHECK(r, x) check(r, x, #x, __LINE__)
#define CHECK_CODE(r, call, code) check_code(r, call, code, #call, __LINE__)
#define CHECK_OK(r, call) CHECK_CODE(r, call, 0)

/* ---- rings and threads ------------------------------------------------------------ */

static inline struct ring *ring_of(int n_ranks)
{
	static const uint8_t nonce[NONCE_SIZE] = "0123456789abcdef";
	struct ring *ring = calloc(1, sizeof(*ring));
	struct ring_page head;
	uint64_t inode;

	assert_non_null(ring);
	assert_int_equal(ring_new(&ring->fd, &inode, nonce, (uint32_t)n_ranks, NULL), 0);
	assert_int_equal(pread(ring->fd, &head, sizeof(head), 0), sizeof(head));
	ring->n_ranks = n_ranks;
	ring->mapped = head.arenas;
	ring->page =
		mmap(NULL, ring->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, 0);
	assert_ptr_not_equal(ring->page, MAP_FAILED);
	return ring;
}

static inline void ring_free(struct ring *ring)
{
	(void)munmap(ring->page, ring->mapped);
	own_close(&ring->fd);
	free(ring);
}

/* For accel_on_wait(), of the whole process. */
static inline int while_waiting(void *data)
{
	(void)data;
	if (!this_rank || !this_rank->is_joined)
		return 0;
	(void)sem_post(&this_rank->waits);
	return this_rank->wait_result;
}

/* Until rank @number waits for others within a call. */
static inline void until_waits(struct rank *r, int number)
{
	while (sem_wait(&r->all[number].waits) < 0)
		;
}

static inline void *be_rank(void *data)
{
	struct rank *r = data;

	this_rank = r;
	r->is_joined = CHECK_OK(
		r, world_over_ring(&r->world, r->ring->page, r->ring->fd, r->number));
	if (r->is_joined)
		r->body(r);
	accel_finish(r->world);
	return NULL;
}

/* All ranks of @ring in @body. How many checks have failed; @ret_ranks, of MAX_RANKS, is
 * for what the ranks noted. */
static inline int failures_over(const struct ring *ring, void (*body)(struct rank *),
				const void *data, struct rank *ret_ranks)
{
	struct rank *all = calloc(MAX_RANKS, sizeof(*all));
	int n = ring->n_ranks, failures = 0;

	assert_non_null(all);
	accel_on_wait(while_waiting, NULL);
	for (int i = 0; i < n; i++) {
		all[i].number = i;
		all[i].size = n;
		all[i].data = data;
		all[i].body = body;
		all[i].ring = ring;
		all[i].all = all;
		all[i].random = (uint64_t)i + 1;
		assert_int_equal(sem_init(&all[i].waits, 0, 0), 0);
	}
	for (int i = 0; i < n; i++)
		assert_int_equal(pthread_create(&all[i].thread, NULL, be_rank, &all[i]),
				 0);
	for (int i = 0; i < n; i++)
		assert_int_equal(pthread_join(all[i].thread, NULL), 0);
	for (int i = 0; i < n; i++) {
		(void)sem_destroy(&all[i].waits);
		if (all[i].n_failures)
			print_error("%d failures, the first: %s\n", all[i].n_failures,
				    all[i].failure);
		failures += all[i].n_failures;
	}
	if (ret_ranks)
		memcpy(ret_ranks, all, MAX_RANKS * sizeof(*all));
	free(all);
	return failures;
}

static inline void run(int n_ranks, void (*body)(struct rank *), const void *data)
{
	struct ring *ring = ring_of(n_ranks);
	int failures = failures_over(ring, body, data, NULL);

	ring_free(ring);
	assert_int_equal(failures, 0);
}

/* ---- data ------------------------------------------------------------------------- */

static inline uint64_t next_random(uint64_t *state)
{
	uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);

	x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
	return x ^ (x >> 31);
}

static inline uint64_t random_below(uint64_t *state, uint64_t n)
{
	return next_random(state) % n;
}

/* What rank @rank holds at @i: small integers, so that sums are exact in any dtype. */
static inline double value_of(int dtype, uint64_t seed, int rank, size_t i)
{
	uint64_t x =
		(seed + (uint64_t)rank * 0x10001 + i + 1) * UINT64_C(0x9e3779b97f4a7c15);
	double value = (double)(x >> 60);

	if (dtype == ACCEL_BOOL)
		return x >> 63 ? 1 : 0;
	return dtype == ACCEL_UINT8 ? value : value - 8;
}

static inline void fill(int dtype, void *data, size_t count, uint64_t seed, int rank)
{
	for (size_t i = 0; i < count; i++)
		set_element(dtype, data, i, value_of(dtype, seed, rank, i));
}

static inline double fold(int dtype, int op, double a, double b)
{
	if (op == ACCEL_MIN)
		return b < a ? b : a;
	if (op == ACCEL_MAX)
		return b > a ? b : a;
	return dtype == ACCEL_BOOL ? (a || b) : a + b;
}

/* The ranks in @active, one bit each, combined; divided by @divisor. */
static inline double reduced(int dtype, int op, uint64_t seed, unsigned active,
			     int divisor, size_t i)
{
	bool is_first = true;
	double acc = 0;

	for (int rank = 0; active >> rank; rank++) {
		double x = value_of(dtype, seed, rank, i);

		if (!(active >> rank & 1))
			continue;
		acc = is_first ? x : fold(dtype, op, acc, x);
		is_first = false;
	}
	return acc / divisor;
}

static inline bool is_close(int dtype, double got, double want)
{
	static const double tolerances[] = { [ACCEL_FLOAT32] = 1e-6,
					     [ACCEL_FLOAT64] = 1e-15,
					     [ACCEL_FLOAT16] = 1e-3,
					     [ACCEL_BFLOAT16] = 8e-3 };

	if (!is_floating(dtype))
		return got == want;
	return fabs(got - want) <= tolerances[dtype] * fabs(want);
}

/* Into the digest that all ranks must have in common. */
static inline void note(struct rank *r, const void *data, size_t bytes)
{
	const uint8_t *p = data;
	uint64_t h = r->digest;

	for (; bytes >= 8; bytes -= 8, p += 8) {
		uint64_t word;

		memcpy(&word, p, sizeof(word));
		h = (h ^ word) * UINT64_C(0x100000001b3);
		h ^= h >> 32;
	}
	while (bytes--)
		h = (h ^ *p++) * UINT64_C(0x100000001b3);
	r->digest = h;
}

static inline void check_reduced(struct rank *r, int dtype, int op, const void *data,
				 size_t count, uint64_t seed, unsigned active,
				 int divisor)
{
	char text[256];

	note(r, data, count * dtype_size(dtype));
	for (size_t i = 0; i < count; i++) {
		double want = reduced(dtype, op, seed, active, divisor, i);
		double got = element(dtype, data, i);

		if (is_close(dtype, got, want))
			continue;
		(void)snprintf(text, sizeof(text),
			       "%s by op %d: element %zu of %zu is %g instead of %g",
			       dtype_name(dtype), op, i, count, got, want);
		(void)check(r, false, text, __LINE__);
		return;
	}
}

static inline struct accel_array array_of(void *data, int dtype, uint64_t count)
{
	return (struct accel_array){
		.data = data, .dtype = dtype, .n_dims = 1, .dims = { count }
	};
}

enum { FENCE = 32 };

/* Memory with a fence behind it. */
static inline void *fenced(int dtype, size_t count)
{
	size_t bytes = count * dtype_size(dtype);
	uint8_t *p = malloc(bytes + FENCE);

	if (!p)
		abort();
	memset(p + bytes, 0xa5, FENCE);
	return p;
}

static inline void free_fenced(struct rank *r, void *data, int dtype, size_t count)
{
	const uint8_t *p = (const uint8_t *)data + count * dtype_size(dtype);

	for (int i = 0; i < FENCE; i++)
		if (!CHECK(r, p[i] == 0xa5))
			break;
	free(data);
}
