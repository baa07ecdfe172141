#pragma once

/*
 * What the parts of libaccel share: the world, its cells and slots.
 *
 * Every rank owns RING_SLOTS slots. A collective passes through one slot or
 * several: slot number n of a rank (they are counted from the beginning of the
 * job) lies at n modulo RING_SLOTS. All ranks use equally many numbers for a
 * collective, so they always agree on the next one. The first slot of a
 * collective begins with a head that says what its rank wants.
 *
 * A slot is valid when its seq is its number + 1, and may be written again when
 * `consumed` of all ranks is beyond it.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/page.h"
#include "runtime/accel.h"

enum kind {
	KIND_NONE,
	KIND_BARRIER,
	KIND_REDUCE,
	KIND_BROADCAST,
	KIND_GATHER,
	KIND_PREPARE,
	KIND_TOUCHED, /* which parameters have gradients */
	KIND_BACKWARD,
	KIND_ALLOC,
	KIND_STOP,
	KIND_JOIN,
	N_KINDS,
};

enum { LABEL_MAX = 48 };

enum head_flag {
	HEAD_ARENA = 1, /* the data lies in the arenas: no copies */
	HEAD_KEEP = 2,
};

struct head {
	uint8_t kind, dtype, op, flags;
	int32_t root;
	uint64_t bytes; /* this rank's data, all its slots together */
	uint64_t tag;   /* must be equal on all ranks; what it is depends on the kind */
	uint32_t value; /* may differ */
	uint32_t generation; /* of the rank's process */
	int32_t n_dims;
	uint64_t dims[ACCEL_MAX_DIMS];
	char label[LABEL_MAX]; /* what the program calls it; ends with 0 */
};

struct slot {
	uint64_t seq;  /* number + 1 when valid */
	uint64_t done; /* number + 1 when this rank's share is reduced */
	struct head head;
};

struct cell {
	/* Written by its rank. */
	uint64_t consumed; /* slots below this number are read */
	uint32_t cpu;      /* where it was last seen, plus 1 */
	_Alignas(CACHE_LINE) uint32_t bell;
	/* Written by the others: how many wait for the bell. */
	uint32_t waiters;
	/* Written when joining and leaving. */
	_Alignas(CACHE_LINE) uint32_t owner; /* pid */
	uint32_t state;                      /* enum page_state */
	uint32_t generation;                 /* how many processes have been this rank */
	uint32_t rank;                       /* in the whole world */
	uint64_t start_time, pid_namespace;
	uint64_t cpus[16]; /* where it may run, one bit each */
};

_Static_assert(sizeof(struct slot) <= SLOT_HEAD, "a slot's head has its room");
_Static_assert(sizeof(struct cell) <= CELL_ENDED, "a cell has its room");
_Static_assert(sizeof(struct ring_page) <= 4096, "the ring's head has its room");

/* 64-bit FNV-1a: the same on all ranks for the same bytes. */
#define HASH_START UINT64_C(0xcbf29ce484222325)

static inline uint64_t hash_byte(uint64_t hash, uint8_t byte)
{
	return (hash ^ byte) * UINT64_C(0x100000001b3);
}

static inline uint64_t hash_number(uint64_t hash, uint64_t number)
{
	for (int i = 0; i < 8; i++, number >>= 8)
		hash = hash_byte(hash, (uint8_t)number);
	return hash;
}

enum pending { NOTHING_PENDING, GATHER_PENDING, BACKWARD_PENDING };

struct accel_world {
	int rank, size, local_rank, local_size;
	const char *launcher; /* or NULL */
	char device[32], precision[16];

	struct control_page *page; /* or NULL */
	struct ring_page *ring;    /* NULL in a world of one */
	size_t ring_mapped;
	int ring_fd;
	int name_fd;    /* holds this rank's name under other launchers, or -1 */
	bool is_rank;   /* this process has claimed its place */
	bool borrowed;  /* the ring's mapping is the caller's */
	uint32_t *mark; /* 1 in this process, 0 in its forks; NULL: compare pids */
	int pid;

	uint64_t next;      /* number of the next slot */
	uint64_t free_till; /* slots below this number are known to be free */
	uint32_t generation;
	uint64_t pid_namespace;
	int spins;
	uint64_t moved_ms; /* when this rank last left another one's core */
	int timeout_s;
	uint64_t deadline_ms; /* of the call that runs; 0: not set yet */
	bool busy;
	enum pending pending;
	struct accel_model *pending_model;
	int broken; /* the error all collective calls return from now on, or 0 */
	char broken_text[ABORT_TEXT];

	/* The collective that runs. */
	int n_active, *active; /* local ranks that take part */
	struct head head;      /* what this rank wants */
	char label[LABEL_MAX]; /* of the next one */

	struct region *regions; /* of the arenas that are mapped */
	uint64_t arena_used;    /* bytes of each arena */

	struct accel_array gather; /* between accel_gather() and accel_gather_into() */

	struct accel_model *models;
	struct accel_counters counters;
};

/* ---- world.c: who is who -------------------------------------------------- */

/* The ranks of one machine over a ring that is mapped already, one world for
 * each; for tests, where ranks are threads. Free it with accel_finish(). */
int world_over_ring(accel_world **ret, struct ring_page *ring, int fd, int local_rank);

/* ACCEL_E_OWNED: process @pid is this rank. */
int fail_owned(const accel_world *w, uint32_t pid);

static inline struct cell *cell_of(const accel_world *w, int rank)
{
	return (struct cell *)((uint8_t *)w->ring + w->ring->cells +
			       (size_t)rank * CELL_BYTES);
}

/* Is this rank's place empty for good? The supervisor says so, where there is one. */
static inline bool has_ended(const struct cell *cell)
{
	const uint32_t *ended = (const uint32_t *)((const uint8_t *)cell + CELL_ENDED);

	return __atomic_load_n(ended, __ATOMIC_SEQ_CST);
}

static inline struct slot *slot_of(const accel_world *w, int rank, uint64_t number)
{
	size_t stride = SLOT_HEAD + (size_t)w->ring->slot_bytes;

	return (struct slot *)((uint8_t *)w->ring + w->ring->slots +
			       ((size_t)rank * RING_SLOTS + number % RING_SLOTS) *
				       stride);
}

static inline uint8_t *data_of(struct slot *slot)
{
	return (uint8_t *)slot + SLOT_HEAD;
}

/* ---- error.c -------------------------------------------------------------- */

/* Keep the sentence for accel_error(). Returns @code. */
int fail(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3), cold));
/* Put "context: " in front of the sentence there is. Returns @code. */
int fail_in(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3), cold));

/* ---- wait.c: waiting for other ranks --------------------------------------- */

static inline bool reached(const uint64_t *word, uint64_t want)
{
	return __atomic_load_n(word, __ATOMIC_SEQ_CST) >= want;
}

/* Wait until *@word, which @rank counts up, is at least @want. */
int await(accel_world *w, int rank, const uint64_t *word, uint64_t want);

/* Tell the others which core this rank is on. Returns it, plus 1. */
uint32_t note_cpu(accel_world *w);

/* Set a word that others wait for, and wake them. */
void announce(accel_world *w, uint64_t *word, uint64_t value);

/* Wake whoever waits for any rank of the ring. */
void wake_all(accel_world *w);

/* Write for all ranks why the world breaks, unless somebody did already. From any
 * thread. */
void tell_why(accel_world *w, int code, int rank, const char *text);

/* Break the world for all ranks, unless somebody did already: what @rank has done
 * or not done. Returns the code that everybody gets. */
int break_world(accel_world *w, int code, int rank, const char *text);

/* What accel_fail() and others wrote, as this rank's error. 0 while whole. */
int world_broken(accel_world *w);

/* How the process of a rank is: alive, stopped or gone. */
enum life { LIFE_ALIVE, LIFE_STOPPED, LIFE_GONE };
enum life life_of(const accel_world *w, const struct cell *cell);

uint64_t start_time_of(int pid);
uint64_t own_pid_namespace(void);

void sleep_ms(int ms);

/* Has the callback of accel_on_wait() had enough? */
bool wants_to_give_up(void);

/* ---- call.c: the beginning and the end of every collective ------------------ */

/* Checks a call of any kind begins with: right process, one thread, whole. */
int enter(accel_world *w, enum pending allowed);
int leave(accel_world *w, int r);
bool is_forked(const accel_world *w);

/* Fill in w->head first. Claims this rank's next slot; its data may be written. */
int call_begin(accel_world *w, struct slot **ret);
/* Send it and wait for the heads of all others. Fills in w->active. On
 * ACCEL_E_MISMATCH the call is over. */
int call_meet(accel_world *w);
/* The call used @n_slots numbers; all data of others is read. */
void call_end(accel_world *w, uint32_t n_slots);
/* All slots below @number are read. */
void call_consumed(accel_world *w, uint64_t number);
/* Wait until this rank's slot @number may be written. */
int call_await_free(accel_world *w, uint64_t number);
/* Wait for the slot @number of @rank, which has a head or not. */
int call_await_slot(accel_world *w, int rank, uint64_t number);

/* How many slots the call that meets in slot @number takes: the same on all. */
uint32_t slots_of_call(const accel_world *w, const struct head *head, uint64_t number);

/* "gather of float32 (2, 3)" */
void describe(const struct head *head, char *text, size_t size);
size_t dtype_size(int dtype);
const char *dtype_name(int dtype);

/* ---- flow.c: data that passes through slots --------------------------------- */

/* Memory in pieces, as if they were one. */
struct piece {
	void *data;
	size_t bytes;
};

/* Combine elementwise over the active ranks, in place. w->head describes it; its
 * bytes are those of @pieces. */
int flow_reduce(accel_world *w, const struct piece *pieces, size_t n, int dtype, int op,
		double factor);
/* Copy those of the root to everybody. */
int flow_broadcast(accel_world *w, const struct piece *pieces);

/* ---- kernels.c: arithmetic --------------------------------------------------- */

/*
 * Combine @count elements of @n sources and write the result to @n_to places,
 * any of which may be one of the sources. Sums of floating types are multiplied
 * by @factor.
 */
void combine(int dtype, int op, void *const *to, int n_to, const void *const *sources,
	     int n, size_t count, double factor);

/* Multiply in place. Returns whether any element is infinite or NaN afterwards.
 * Floating types only. */
bool scale_and_check(int dtype, void *data, size_t count, double factor);

bool is_floating(int dtype);

/* ---- find.c: the way to the other ranks -------------------------------------- */

struct identity {
	int rank, size, local_rank, local_size;
	const char *launcher; /* "accel", "torchrun", ... or NULL when started by hand */
};

int identity_read(struct identity *ret);
/* Find page and ring, or make the ring with the other ranks. */
int find_pages(accel_world *w, const struct identity *id);
/* Let another process be this rank. */
void release_name(accel_world *w);

/* ---- arena.c ------------------------------------------------------------------ */

/* Do all pieces lie in this rank's arena, if it has one? *@ret_tag tells their places. */
bool in_arena(const accel_world *w, const struct piece *pieces, size_t n,
	      uint64_t *ret_tag);
void *arena_of(const accel_world *w, int rank, const void *own);
void arenas_free(accel_world *w);
/* The active ranks meet in an accel_alloc() that this rank, which has joined, leaves
 * to them: what they allocate is at the same place in all arenas later too. */
void arena_follow(accel_world *w, uint64_t number);

/* ---- model.c -------------------------------------------------------------------- */

void models_free(accel_world *w);
