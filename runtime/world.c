/* Joining and leaving. */

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/own.h"
#include "runtime/world.h"

enum {
	TIMEOUT_S = 1800,
	/* With a core for each rank the others answer within microseconds, and a sleep
	 * costs fifty. */
	SPINS = 2000,
};

static accel_world *the_world; /* of this process */

/* ---- the environment ----------------------------------------------------------- */

static int read_timeout(int *ret)
{
	const char *text = getenv("ACCEL_TIMEOUT");
	char *end;
	long n;

	*ret = TIMEOUT_S;
	if (!text || !*text)
		return 0;
	errno = 0;
	n = strtol(text, &end, 10);
	if (errno || *end || n < 1 || n > 10 * 365 * 86400L)
		return fail(
			ACCEL_E_INVALID,
			"ACCEL_TIMEOUT is \"%s\": it is a number of seconds, at least 1",
			text);
	*ret = (int)n;
	return 0;
}

static void copy_text(char *to, size_t size, const char *text, const char *otherwise)
{
	(void)snprintf(to, size, "%s", text && *text ? text : otherwise);
}

/* ---- being a rank ----------------------------------------------------------------- */

int fail_owned(const accel_world *w, uint32_t pid)
{
	static const struct {
		const char *launcher, *unset;
	} ways[] = {
		{ "mpirun", "-u OMPI_COMM_WORLD_SIZE" },
		{ "hydra", "-u PMI_SIZE" },
		{ "srun", "-u SLURM_STEP_ID" },
	};
	const char *unset = "-u RANK -u WORLD_SIZE";
	char who[32] = "another process";

	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
		if (w->launcher && strcmp(w->launcher, ways[i].launcher) == 0)
			unset = ways[i].unset;
	if (pid)
		(void)snprintf(who, sizeof(who), "process %u", pid);
	return fail(ACCEL_E_OWNED,
		    "%s is rank %d of this job already, and process %d has its "
		    "environment; to run a program by itself in there, start it with\n"
		    "    env %s ...",
		    who, w->rank, w->pid, unset);
}

/* Is the process that holds this rank in another pid namespace than we? */
static bool is_other_namespace(const accel_world *w)
{
	uint64_t held = w->ring ? cell_of(w, w->local_rank)->pid_namespace : 0;

	return held && held != w->pid_namespace;
}

/*
 * Take the place of a rank: it is free, or its last holder has left it in order (a
 * wrapper may run one program after another). The pid says who holds it.
 */
static int claim(accel_world *w, uint32_t *owner, uint32_t *state)
{
	uint32_t old = __atomic_load_n(owner, __ATOMIC_SEQ_CST), nobody = 0;
	uint32_t finished = PAGE_FINISHED;
	/* Of several that come at once, one changes the word that says it is free. */
	bool is_ours =
		old ? __atomic_compare_exchange_n(state, &finished, PAGE_JOINED, false,
						  __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
		    : __atomic_compare_exchange_n(owner, &nobody, (uint32_t)w->pid, false,
						  __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);

	if (is_ours) {
		__atomic_store_n(owner, (uint32_t)w->pid, __ATOMIC_SEQ_CST);
		__atomic_store_n(state, PAGE_JOINED, __ATOMIC_SEQ_CST);
		w->is_rank = true;
		return 0;
	}
	old = __atomic_load_n(owner, __ATOMIC_SEQ_CST);
	/* Of another pid namespace, it may be a child with the same number. */
	if (old == (uint32_t)w->pid && !is_other_namespace(w))
		return fail(ACCEL_E_LOST,
			    "process %u was rank %d already before it ran this program "
			    "(exec): call accel_finish() before exec, or start the job "
			    "again",
			    old, w->rank);
	if (kill((pid_t)old, 0) < 0 && errno == ESRCH)
		return fail(
			ACCEL_E_LOST,
			"process %u, which was rank %d, ended in the middle of its work; "
			"the job has to start again",
			old, w->rank);
	return fail_owned(w, old);
}

static void note_cpus(struct cell *cell)
{
	uint64_t bits[sizeof(cell->cpus) / sizeof(cell->cpus[0])] = { 0 };
	cpu_set_t set;

	CPU_ZERO(&set);
	_Static_assert(sizeof(set) == sizeof(bits), "one bit for each processor");
	if (sched_getaffinity(0, sizeof(set), &set) == 0)
		memcpy(bits, &set, sizeof(bits));
	for (size_t i = 0; i < sizeof(bits) / sizeof(bits[0]); i++)
		__atomic_store_n(&cell->cpus[i], bits[i], __ATOMIC_RELAXED);
}

/* For ranks that cannot see our pid: the lock ends when we do. */
static void hold_lock(const accel_world *w)
{
	struct flock lock = { .l_type = F_WRLCK, .l_start = w->local_rank, .l_len = 1 };

	if (w->ring_fd >= 0)
		(void)fcntl(w->ring_fd, F_SETLK, &lock);
}

static int take_cell(accel_world *w)
{
	struct cell *cell = cell_of(w, w->local_rank);
	int r = claim(w, &cell->owner, &cell->state);

	if (r < 0)
		return r;
	cell->rank = (uint32_t)w->rank;
	cell->pid_namespace = w->pid_namespace;
	cell->start_time = start_time_of(w->pid);
	note_cpus(cell);
	hold_lock(w);
	w->generation = __atomic_add_fetch(&cell->generation, 1, __ATOMIC_SEQ_CST);
	/* Where the one before us stopped. */
	w->next = __atomic_load_n(&cell->consumed, __ATOMIC_SEQ_CST);
	return world_broken(w);
}

/* Do the ranks have a core each? All of them have come when this is asked. */
static int spins_for(const accel_world *w)
{
	int n = 0;

	if (w->page && w->page->n_cores)
		return (int)w->page->n_cores >= w->local_size ? SPINS : 0;
	for (size_t i = 0; i < sizeof(((struct cell *)0)->cpus) / sizeof(uint64_t); i++) {
		uint64_t all = 0;

		for (int r = 0; r < w->local_size; r++)
			all |= __atomic_load_n(&cell_of(w, r)->cpus[i], __ATOMIC_RELAXED);
		n += __builtin_popcountll(all);
	}
	return n >= w->local_size ? SPINS : 0;
}

/* A page that is zero in forks, so that they are told apart without a system call. */
static void make_mark(accel_world *w)
{
	uint32_t *mark = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (mark == MAP_FAILED)
		return;
	if (madvise(mark, 4096, MADV_WIPEONFORK) < 0) {
		(void)munmap(mark, 4096);
		return;
	}
	*mark = 1;
	w->mark = mark;
}

static accel_world *world_new(const struct identity *id)
{
	accel_world *w = calloc(1, sizeof(*w));

	if (!w)
		return NULL;
	w->active = calloc((size_t)id->local_size, sizeof(*w->active));
	if (!w->active) {
		free(w);
		return NULL;
	}
	w->launcher = id->launcher;
	w->rank = id->rank;
	w->size = id->size;
	w->local_rank = id->local_rank;
	w->local_size = id->local_size;
	w->ring_fd = w->name_fd = -1;
	w->pid = getpid();
	w->pid_namespace = own_pid_namespace();
	make_mark(w);
	copy_text(w->device, sizeof(w->device), getenv("ACCEL_DEVICE"), "cpu");
	copy_text(w->precision, sizeof(w->precision),
		  getenv("ACCEL_MIXED_PRECISION") ?: getenv("ACCELERATE_MIXED_PRECISION"),
		  "no");
	return w;
}

/* Nothing that others see. */
static accel_world *world_free(accel_world *w)
{
	bool is_shared = !is_forked(w); /* else these addresses are somebody else's */

	models_free(w);
	if (is_shared)
		arenas_free(w);
	if (is_shared && w->ring && !w->borrowed)
		(void)munmap(w->ring, w->ring_mapped);
	if (is_shared && w->page)
		(void)munmap(w->page, PAGE_SIZE);
	own_close(&w->ring_fd);
	release_name(w);
	if (w->mark)
		(void)munmap(w->mark, 4096);
	free(w->active);
	free(w);
	return NULL;
}

static void set_finished(uint32_t *state)
{
	uint32_t joined = PAGE_JOINED;

	/* A failure stays what it is. */
	(void)__atomic_compare_exchange_n(state, &joined, PAGE_FINISHED, false,
					  __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static void say_goodbye(accel_world *w)
{
	if (is_forked(w))
		return;
	if (w->page && w->page->owner == (uint32_t)w->pid)
		set_finished(&w->page->state);
	if (w->ring && cell_of(w, w->local_rank)->owner == (uint32_t)w->pid) {
		set_finished(&cell_of(w, w->local_rank)->state);
		wake_all(w);
	}
}

/* A program that ends in order without accel_finish(). */
__attribute__((destructor)) static void at_exit(void)
{
	if (the_world)
		say_goodbye(the_world);
}

/* Until everybody has come, nobody knows how many share the cores. */
static int meet_everybody(accel_world *w)
{
	int r;

	w->spins = 0;
	r = accel_barrier(w);
	w->counters = (struct accel_counters){ 0 };
	w->spins = spins_for(w);
	return r;
}

static int join_ring(accel_world *w)
{
	int r = take_cell(w);

	if (!r)
		r = meet_everybody(w);
	return r < 0 ? fail_in(r, "joining") : 0;
}

static int join(accel_world *w, const struct identity *id)
{
	int r = read_timeout(&w->timeout_s);

	if (!r)
		r = find_pages(w, id);
	if (!r && w->page)
		r = claim(w, &w->page->owner, &w->page->state);
	if (!r && w->size == 1 && w->ring) {
		/* Nobody to share it with. */
		(void)munmap(w->ring, w->ring_mapped);
		w->ring = NULL;
		own_close(&w->ring_fd);
	}
	if (!r && w->ring)
		r = join_ring(w);
	return r;
}

int accel_init(accel_world **ret)
{
	struct identity id;
	accel_world *w;
	int r;

	if (the_world && !is_forked(the_world)) {
		*ret = the_world;
		return 0;
	}
	if (the_world)
		return enter(the_world, NOTHING_PENDING); /* says what is wrong */
	r = identity_read(&id);
	if (r < 0)
		return r;
	w = world_new(&id);
	if (!w)
		return fail(ACCEL_E_MEMORY, "joining: no memory");
	r = join(w, &id);
	if (r < 0) {
		if (w->is_rank)
			say_goodbye(w);
		(void)world_free(w);
		return r;
	}
	the_world = w;
	*ret = w;
	return 0;
}

int world_over_ring(accel_world **ret, struct ring_page *ring, int fd, int local_rank)
{
	struct identity id = { .rank = local_rank,
			       .size = (int)ring->n_ranks,
			       .local_rank = local_rank,
			       .local_size = (int)ring->n_ranks };
	accel_world *w = world_new(&id);
	int r;

	if (!w)
		return fail(ACCEL_E_MEMORY, "joining: no memory");
	r = read_timeout(&w->timeout_s);
	w->ring = ring;
	w->borrowed = true;
	w->ring_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
	if (!r)
		r = join_ring(w);
	if (r < 0) {
		(void)world_free(w);
		return r;
	}
	*ret = w;
	return 0;
}

void accel_finish(accel_world *w)
{
	if (!w)
		return;
	say_goodbye(w);
	if (w == the_world)
		the_world = NULL;
	(void)world_free(w);
}

/* ---- questions ------------------------------------------------------------------------
 */

int accel_rank(const accel_world *w)
{
	return w->rank;
}

int accel_size(const accel_world *w)
{
	return w->size;
}

int accel_local_rank(const accel_world *w)
{
	return w->local_rank;
}

int accel_local_size(const accel_world *w)
{
	return w->local_size;
}

const char *accel_device(const accel_world *w)
{
	return w->device;
}

const char *accel_mixed_precision(const accel_world *w)
{
	return w->precision;
}
