/*
 * Waiting for another rank: a short spin, then sleep on its bell. Who waits looks
 * ten times a second whether the rank still lives; who finds it dead tells all
 * others, so that everybody gets the same error.
 */

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/own.h"
#include "runtime/world.h"

enum { LOOK_MS = 100, MOVE_MS = 50, LEAVE_MS = 750, LEAVE_STEP_MS = 5 };

static inline void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ __volatile__("yield");
#endif
}

static int futex_wait(const uint32_t *word, uint32_t value, int ms)
{
	struct timespec limit = { ms / 1000, (long)(ms % 1000) * 1000000 };

	return syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0) < 0 ? -errno
										: 0;
}

static void futex_wake(const uint32_t *word)
{
	(void)syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void sleep_ms(int ms)
{
	struct timespec t = { ms / 1000, (long)(ms % 1000) * 1000000 };

	(void)nanosleep(&t, NULL);
}

static void ring_bell(struct cell *cell)
{
	(void)__atomic_add_fetch(&cell->bell, 1, __ATOMIC_SEQ_CST);
	futex_wake(&cell->bell);
}

/* Sequentially consistent, like the other side's: either we see the waiter or it
 * sees the new value. */
void announce(accel_world *w, uint64_t *word, uint64_t value)
{
	struct cell *own = cell_of(w, w->local_rank);

	__atomic_store_n(word, value, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&own->waiters, __ATOMIC_SEQ_CST))
		ring_bell(own);
}

void wake_all(accel_world *w)
{
	for (int r = 0; r < w->local_size; r++)
		ring_bell(cell_of(w, r));
}

uint32_t note_cpu(accel_world *w)
{
	uint32_t cpu = (uint32_t)sched_getcpu() + 1;

	__atomic_store_n(&cell_of(w, w->local_rank)->cpu, cpu, __ATOMIC_RELAXED);
	return cpu;
}

/* ---- who still lives ---------------------------------------------------------- */

/* State, threads and start time of a process; false when that is not to be had. */
static bool read_stat(int pid, char *ret_state, long *ret_threads, uint64_t *ret_start)
{
	char path[32], text[1024], *at;
	OWN_FD int fd = -1;
	ssize_t n;

	(void)snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return false;
	text[n] = 0;
	at = strrchr(text, ')');
	if (!at || at[1] != ' ')
		return false;
	*ret_state = at[2];
	/* Fields are counted from 1; the state is the third, the start the 22nd. */
	*ret_threads = 0;
	for (int field = 3; at && field <= 22; field++) {
		if (field == 21) /* so far at the 20th */
			*ret_threads = strtol(at, NULL, 10);
		at = strchr(at + 1, ' ');
	}
	*ret_start = at ? strtoull(at, NULL, 10) : 0;
	return true;
}

uint64_t start_time_of(int pid)
{
	uint64_t start;
	long threads;
	char state;

	return read_stat(pid, &state, &threads, &start) ? start : 0;
}

uint64_t own_pid_namespace(void)
{
	struct stat st;

	return stat("/proc/self/ns/pid", &st) == 0 ? st.st_ino : 0;
}

/* The lock that each process holds on its byte of the ring ends with it; for ranks
 * whose pids mean nothing here. */
static enum life life_by_lock(const accel_world *w, const struct cell *cell)
{
	int local_rank =
		(int)(((const uint8_t *)cell - (uint8_t *)cell_of(w, 0)) / CELL_BYTES);
	struct flock lock = { .l_type = F_WRLCK, .l_start = local_rank, .l_len = 1 };

	if (w->ring_fd < 0 || fcntl(w->ring_fd, F_GETLK, &lock) < 0)
		return LIFE_ALIVE;
	return lock.l_type == F_UNLCK ? LIFE_GONE : LIFE_ALIVE;
}

enum life life_of(const accel_world *w, const struct cell *cell)
{
	uint64_t start;
	long threads;
	char state;

	if (cell == cell_of(w, w->local_rank))
		return LIFE_ALIVE;
	/* Pids of different namespaces may be equal. */
	if (!w->pid_namespace || cell->pid_namespace != w->pid_namespace)
		return life_by_lock(w, cell);
	if ((int)cell->owner == w->pid)
		return LIFE_ALIVE;
	/* Without descriptors, memory or /proc nothing is known but this. */
	if (!read_stat((int)cell->owner, &state, &threads, &start))
		return kill((pid_t)cell->owner, 0) < 0 && errno == ESRCH ? LIFE_GONE
									 : LIFE_ALIVE;
	if (cell->start_time && start != cell->start_time)
		return LIFE_GONE;
	/* A main thread that has ended is a zombie while others run. */
	if (state == 'X' || (state == 'Z' && threads <= 1))
		return LIFE_GONE;
	return state == 'T' || state == 't' ? LIFE_STOPPED : LIFE_ALIVE;
}

/* ---- the end of a world --------------------------------------------------------- */

void tell_why(accel_world *w, int code, int rank, const char *text)
{
	struct ring_page *ring = w->ring;
	uint32_t nobody = 0;

	if (ring && __atomic_compare_exchange_n(&ring->abort_state, &nobody, 1, false,
						__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
		ring->abort_rank = (uint32_t)rank;
		ring->abort_code = code;
		(void)snprintf(ring->abort_text, sizeof(ring->abort_text), "%s", text);
		__atomic_store_n(&ring->abort_state, 2, __ATOMIC_SEQ_CST);
		wake_all(w);
	}
}

int break_world(accel_world *w, int code, int rank, const char *text)
{
	tell_why(w, code, rank, text);
	return world_broken(w);
}

int world_broken(accel_world *w)
{
	struct ring_page *ring = w->ring;

	if (!w->broken && ring && __atomic_load_n(&ring->abort_state, __ATOMIC_SEQ_CST)) {
		/* Its writer may have died in the middle. */
		for (int i = 0; i < LOOK_MS; i++) {
			if (__atomic_load_n(&ring->abort_state, __ATOMIC_SEQ_CST) == 2)
				break;
			sleep_ms(1);
		}
		w->broken = ring->abort_code < 0 ? ring->abort_code : ACCEL_E_LOST;
		(void)snprintf(w->broken_text, sizeof(w->broken_text), "%.*s",
			       (int)sizeof(w->broken_text) - 1, ring->abort_text);
	}
	return w->broken ? fail(w->broken, "%s", w->broken_text) : 0;
}

static int lost(accel_world *w, int rank, const char *how)
{
	const struct cell *cell = cell_of(w, rank);
	int whose = w->rank - w->local_rank + rank;
	char call[256], process[32] = "", text[ABORT_TEXT];

	describe(&w->head, call, sizeof(call));
	if (cell->owner)
		(void)snprintf(process, sizeof(process), " (process %u)", cell->owner);
	(void)snprintf(text, sizeof(text), "rank %d %s%s, while others wait for it in %s",
		       whose, how, process, call);
	return break_world(w, ACCEL_E_LOST, whose, text);
}

static const char *how_is(const accel_world *w, const struct cell *cell)
{
	return life_of(w, cell) == LIFE_STOPPED ? "stopped by a signal"
						: "busy with something else";
}

static size_t add_missing(accel_world *w, int rank, char *text, size_t size)
{
	const struct cell *cell = cell_of(w, rank);
	int n;

	if (cell->state == PAGE_UNUSED)
		n = snprintf(text, size, " local rank %d (not here yet)", rank);
	else
		n = snprintf(text, size, " rank %u (process %u, %s)", cell->rank,
			     cell->owner, how_is(w, cell));
	return (size_t)n < size ? (size_t)n : size - 1;
}

/* Everybody who has not come, and how they are; else the one we wait for. */
static int timed_out(accel_world *w, int rank)
{
	char call[256], text[ABORT_TEXT];
	size_t len, begin;

	describe(&w->head, call, sizeof(call));
	len = begin = (size_t)snprintf(text, sizeof(text),
				       "%s: waited %d s (ACCEL_TIMEOUT) for", call,
				       w->timeout_s);
	for (int r = 0; r < w->local_size; r++)
		if (r != w->local_rank &&
		    !reached(&slot_of(w, r, w->next)->seq, w->next + 1))
			len += add_missing(w, r, text + len, sizeof(text) - len);
	if (len == begin)
		(void)add_missing(w, rank, text + len, sizeof(text) - len);
	return break_world(w, ACCEL_E_TIMEOUT, rank, text);
}

/* ---- waiting ---------------------------------------------------------------------- */

/*
 * A rank that has left ends its process soon. Whoever watches the job is to see that
 * first, and how it ended, and us give up second: the other way round we would look
 * like the cause.
 */
static void see_it_end(const accel_world *w, const struct cell *cell)
{
	uint64_t end = now_ms() + LEAVE_MS;

	while (now_ms() < end && life_of(w, cell) != LIFE_GONE && !wants_to_give_up())
		sleep_ms(LEAVE_STEP_MS);
}

/* Has the rank gone without doing what we wait for? */
static int look_at(accel_world *w, int rank, const uint64_t *word, uint64_t want)
{
	struct cell *cell = cell_of(w, rank);
	/* In this order: a rank sets its state before it counts itself, so a new
	 * generation never goes with the end of the one before. */
	uint32_t generation = __atomic_load_n(&cell->generation, __ATOMIC_SEQ_CST);
	uint32_t state = __atomic_load_n(&cell->state, __ATOMIC_SEQ_CST);
	const char *how = NULL;

	if (state == PAGE_UNUSED || (int32_t)(generation - w->generation) < 0) {
		/* Its program, or the one that follows an earlier one, may yet come. */
		if (!has_ended(cell))
			return 0;
		how = "has ended without joining";
	} else if (generation != w->generation || state == PAGE_FINISHED)
		how = "has finished";
	else if (state == PAGE_FAILED)
		how = "has failed";
	else if (life_of(w, cell) == LIFE_GONE)
		how = "has died";
	if (!how || reached(word, want))
		return 0;
	if (state == PAGE_FINISHED)
		see_it_end(w, cell);
	return lost(w, rank, how);
}

static struct {
	int (*on_wait)(void *data);
	void *data;
} hook;

void accel_on_wait(int (*on_wait)(void *data), void *data)
{
	hook.on_wait = on_wait;
	hook.data = data;
}

bool wants_to_give_up(void)
{
	return hook.on_wait && hook.on_wait(hook.data);
}

static int interrupted(accel_world *w)
{
	char call[256], text[ABORT_TEXT];

	describe(&w->head, call, sizeof(call));
	(void)snprintf(text, sizeof(text),
		       "rank %d was interrupted in %s and takes no further part", w->rank,
		       call);
	(void)break_world(w, ACCEL_E_LOST, w->rank, text);
	w->broken = ACCEL_E_INTERRUPTED;
	(void)snprintf(w->broken_text, sizeof(w->broken_text),
		       "interrupted in %s; what the ranks did in it is unknown", call);
	return world_broken(w);
}

static int look_around(accel_world *w, int rank, const uint64_t *word, uint64_t want)
{
	uint64_t now = now_ms();
	/* First, since others may have been interrupted with us. */
	int r = wants_to_give_up() ? interrupted(w) : world_broken(w);

	if (!r)
		r = look_at(w, rank, word, want);
	if (!w->deadline_ms)
		w->deadline_ms = now + (uint64_t)w->timeout_s * 1000;
	if (!r && now >= w->deadline_ms && !reached(word, want))
		r = timed_out(w, rank);
	return r;
}

static int await_asleep(accel_world *w, int rank, const uint64_t *word, uint64_t want)
{
	struct cell *cell = cell_of(w, rank);
	uint64_t looked_ms = now_ms();
	int r = 0;

	if (!w->deadline_ms)
		w->deadline_ms = looked_ms + (uint64_t)w->timeout_s * 1000;
	(void)__atomic_add_fetch(&cell->waiters, 1, __ATOMIC_SEQ_CST);
	while (!r) {
		uint32_t bell = __atomic_load_n(&cell->bell, __ATOMIC_SEQ_CST);
		int how;

		if (reached(word, want))
			break;
		if (__atomic_load_n(&w->ring->abort_state, __ATOMIC_SEQ_CST)) {
			r = look_around(w, rank, word, want);
			break;
		}
		how = futex_wait(&cell->bell, bell, LOOK_MS);
		if (how == -EINTR || now_ms() - looked_ms >= LOOK_MS) {
			looked_ms = now_ms();
			r = look_around(w, rank, word, want);
		} else if (__atomic_load_n(&cell->state, __ATOMIC_SEQ_CST) >
			   PAGE_JOINED) {
			r = look_at(w, rank, word, want);
		}
	}
	(void)__atomic_sub_fetch(&cell->waiters, 1, __ATOMIC_SEQ_CST);
	return r;
}

/*
 * Two ranks that wake each other up stay on one core, since the kernel takes the
 * waker's for the best, while there is one for each. Where we may run is the same
 * afterwards.
 */
static void leave_core(accel_world *w, int core)
{
	uint64_t now = now_ms();
	cpu_set_t all, others;

	if (now - w->moved_ms < MOVE_MS || sched_getaffinity(0, sizeof(all), &all) < 0)
		return;
	w->moved_ms = now;
	others = all;
	CPU_CLR((size_t)core, &others);
	if (CPU_COUNT(&others) && sched_setaffinity(0, sizeof(others), &others) == 0)
		(void)sched_setaffinity(0, sizeof(all), &all);
}

/* A rank on our own core cannot answer while we spin there. */
static int spins_for(accel_world *w, int rank)
{
	uint32_t cpu = note_cpu(w);

	if (__atomic_load_n(&cell_of(w, rank)->cpu, __ATOMIC_RELAXED) != cpu)
		return w->spins;
	if (rank < w->local_rank)
		leave_core(w, (int)cpu - 1);
	return 0;
}

int await(accel_world *w, int rank, const uint64_t *word, uint64_t want)
{
	int spins;

	if (reached(word, want))
		return 0;
	spins = w->spins ? spins_for(w, rank) : 0;
	for (int i = 0; i < spins; i++) {
		pause_cpu();
		if (reached(word, want))
			return 0;
	}
	return await_asleep(w, rank, word, want);
}
