/*
 * One worker of a job that is made to fail. The rank that is told to waits until
 * all others can be signalled, notes the moment and exits 1; every other rank
 * waits for SIGTERM and notes when it came. The notes are times of
 * CLOCK_MONOTONIC in a file that all ranks map, whose layout run.py reads.
 *
 * Nobody but the failing rank leaves before all have their signal: what the
 * exits of some cost the others is the workers' affair, not the launcher's.
 *
 * usage: victim BOARD FAILING_RANK PAUSE_MS (RANK and WORLD_SIZE in the environment)
 */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
	SIGNAL_LIMIT_S = 30, /* without a signal for so long, something is broken */
	READY_LIMIT_MS = 60000,
	ALL_LIMIT_MS = 2000,
	LOOK_MS = 20, /* rare enough that waiting ranks do not disturb a measurement */
};

struct board {
	_Atomic uint32_t n_ready, n_signalled;
	uint64_t failed_ns;
	_Atomic uint64_t signalled_ns[]; /* by rank */
};

static uint64_t now_ns(void)
{
	struct timespec ts;

	(void)clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000 + (uint64_t)ts.tv_nsec;
}

static void pause_ms(long ms)
{
	struct timespec ts = { ms / 1000, ms % 1000 * 1000000 };

	while (nanosleep(&ts, &ts) < 0 && errno == EINTR)
		;
}

/* Until @count has reached @want. Returns 0, or -1 after @limit_ms. */
static int wait_for(_Atomic uint32_t *count, uint32_t want, int limit_ms)
{
	for (int waited_ms = 0; atomic_load(count) < want; waited_ms += LOOK_MS) {
		if (waited_ms >= limit_ms)
			return -1;
		pause_ms(LOOK_MS);
	}
	return 0;
}

static struct board *map_board(const char *path, uint32_t world)
{
	size_t size = sizeof(struct board) + world * sizeof(uint64_t);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	struct board *board;
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return NULL;
	errno = EFBIG;
	if ((size_t)st.st_size < size)
		return NULL;
	board = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	(void)close(fd);
	return board == MAP_FAILED ? NULL : board;
}

static _Noreturn void fail(struct board *board, uint32_t world, long in_ms)
{
	if (wait_for(&board->n_ready, world - 1, READY_LIMIT_MS) < 0) {
		fprintf(stderr, "victim: the other ranks did not get ready\n");
		_exit(3);
	}
	pause_ms(in_ms);
	board->failed_ns = now_ns();
	_exit(1);
}

static int be_signalled(struct board *board, uint32_t rank, uint32_t world)
{
	struct timespec limit = { .tv_sec = SIGNAL_LIMIT_S };
	sigset_t term;

	(void)sigemptyset(&term);
	(void)sigaddset(&term, SIGTERM);
	(void)sigprocmask(SIG_BLOCK, &term, NULL);
	/* Both once before: the page faults of a first time are not the launcher's. */
	(void)now_ns();
	atomic_store(&board->signalled_ns[rank], 0);
	(void)atomic_fetch_add(&board->n_ready, 1);
	if (sigtimedwait(&term, NULL, &limit) != SIGTERM)
		return 4;
	atomic_store(&board->signalled_ns[rank], now_ns());
	(void)atomic_fetch_add(&board->n_signalled, 1);
	return wait_for(&board->n_signalled, world - 1, ALL_LIMIT_MS) < 0 ? 5 : 0;
}

static long number(const char *text)
{
	char *end = NULL;
	long n = text && *text ? strtol(text, &end, 10) : -1;

	return end && !*end ? n : -1;
}

int main(int argc, char **argv)
{
	long rank = number(getenv("RANK")), world = number(getenv("WORLD_SIZE"));
	long failing = argc == 4 ? number(argv[2]) : -1;
	long in_ms = argc == 4 ? number(argv[3]) : -1;
	struct board *board;

	if (rank < 0 || world < 2 || world > 1 << 16 || rank >= world || failing < 0 ||
	    in_ms < 0) {
		fprintf(stderr, "usage: RANK=R WORLD_SIZE=N victim BOARD RANK MS\n");
		return 2;
	}
	board = map_board(argv[1], (uint32_t)world);
	if (!board) {
		fprintf(stderr, "victim: map %s: %s\n", argv[1], strerror(errno));
		return 2;
	}
	if (rank == failing)
		fail(board, (uint32_t)world, in_ms);
	return be_signalled(board, (uint32_t)rank, (uint32_t)world);
}
