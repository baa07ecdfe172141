/*
 * Collectives from C: one rank, which does what run.py asks.
 *
 *     collectives_load BYTES
 *
 * BYTES is the most that will be reduced. A request, from the socket that
 * $BENCH_SOCKET names, is "WHAT BYTES CALLS SAMPLES"; the answer is a list of
 * nanoseconds for each call, one for each sample of CALLS calls. All ranks begin
 * a sample together.
 */

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include <accel.h>

enum { SETTLE_NS = 20 * 1000 * 1000 };

struct load {
	accel_world *world;
	float *source; /* this rank's own data */
	float *private;
	float *arena;
};

struct request {
	char what[16];
	unsigned long long bytes;
	int calls, samples;
};

static void die(const char *what, const char *why)
{
	fprintf(stderr, "collectives_load: %s: %s\n", what, why);
	exit(1);
}

static void need(int r)
{
	if (r < 0)
		die("collective", accel_error());
}

static double now_ns(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* ---- what is measured --------------------------------------------------------- */

static void reduce(struct load *l, float *data, size_t bytes)
{
	struct accel_array a = { .data = data,
				 .dtype = ACCEL_FLOAT32,
				 .n_dims = 1,
				 .dims = { bytes / sizeof(float) } };

	need(accel_reduce(l->world, &a, ACCEL_SUM));
}

static void reduce_private(struct load *l, size_t bytes)
{
	reduce(l, l->private, bytes);
}

static void reduce_arena(struct load *l, size_t bytes)
{
	reduce(l, l->arena, bytes);
}

/* Each time the rank's own data, since sums of sums overflow at some time. */
static void fill_private(struct load *l, size_t bytes)
{
	memcpy(l->private, l->source, bytes);
}

static void fill_arena(struct load *l, size_t bytes)
{
	memcpy(l->arena, l->source, bytes);
}

static void fill_nothing(struct load *l, size_t bytes)
{
	(void)l;
	(void)bytes;
}

static void barrier(struct load *l, size_t bytes)
{
	(void)bytes;
	need(accel_barrier(l->world));
}

static void step(struct load *l, size_t bytes)
{
	(void)bytes;
	accel_step(l->world);
}

static const struct variant {
	const char *name;
	void (*fill)(struct load *l, size_t bytes);
	void (*call)(struct load *l, size_t bytes);
} variants[] = {
	{ "private", fill_private, reduce_private },
	{ "arena", fill_arena, reduce_arena },
	{ "memcpy", fill_private, fill_private },
	{ "barrier", fill_nothing, barrier },
	{ "step", fill_nothing, step },
};

static const struct variant *find_variant(const char *name)
{
	for (size_t i = 0; i < sizeof(variants) / sizeof(variants[0]); i++)
		if (strcmp(variants[i].name, name) == 0)
			return &variants[i];
	die(name, "no such variant");
	return NULL;
}

/*
 * Compute for a while, as a training step does. Ranks that were woken up by one
 * process may be on one core; the kernel moves them apart when both want to run.
 */
static void settle(void)
{
	double end = now_ns() + SETTLE_NS;

	while (now_ns() < end)
		;
}

static double sample_ns(struct load *l, const struct variant *v, const struct request *q)
{
	double start;

	v->fill(l, q->bytes);
	need(accel_barrier(l->world));
	start = now_ns();
	for (int i = 0; i < q->calls; i++)
		v->call(l, q->bytes);
	return (now_ns() - start) / q->calls;
}

/* ---- the data ------------------------------------------------------------------ */

/* Whole numbers, so that sums are exact. */
static float base_value(size_t i)
{
	return (float)(i % 1000 + 1);
}

static void *allocate(size_t bytes)
{
	void *data = malloc(bytes);

	if (!data)
		die("allocate", strerror(errno));
	return data;
}

static void allocate_all(struct load *l, size_t bytes)
{
	void *arena;

	l->source = allocate(bytes);
	l->private = allocate(bytes);
	need(accel_alloc(l->world, bytes, &arena));
	l->arena = arena;
	for (size_t i = 0; i < bytes / sizeof(float); i++)
		l->source[i] = base_value(i) * (float)(accel_rank(l->world) + 1);
}

/* A wrong sum is no figure. Also touches all pages. */
static void check_sums(struct load *l, const char *what, const float *data, size_t bytes)
{
	const struct variant *v = find_variant(what);
	int n = accel_size(l->world);
	float factor = (float)(n * (n + 1) / 2);

	v->fill(l, bytes);
	v->call(l, bytes);
	for (size_t i = 0; i < bytes / sizeof(float); i++)
		if (data[i] != base_value(i) * factor)
			die(what, "the sum is wrong");
}

/* ---- the link -------------------------------------------------------------------- */

static int connect_to_driver(void)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	const char *path = getenv("BENCH_SOCKET");
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (!path || strlen(path) >= sizeof(a.sun_path))
		die("BENCH_SOCKET", "run.py sets it");
	memcpy(a.sun_path, path, strlen(path) + 1);
	if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof(a)) < 0)
		die(path, strerror(errno));
	return fd;
}

static void answer(struct load *l, const struct request *q, int fd)
{
	const struct variant *v = find_variant(q->what);
	double *ns = allocate((size_t)q->samples * sizeof(*ns));

	settle();
	for (int i = 0; i < q->samples; i++)
		ns[i] = sample_ns(l, v, q);
	/* Not before the last: who reads it would wake up in the middle. */
	for (int i = 0; i < q->samples; i++)
		dprintf(fd, "%s%.1f", i ? ", " : "[", ns[i]);
	dprintf(fd, "]\n");
	free(ns);
}

static void serve(struct load *l, size_t most)
{
	int fd = connect_to_driver();
	FILE *in = fdopen(fd, "r");
	char line[128];

	if (!in)
		die("fdopen", strerror(errno));
	dprintf(fd, "hello %d\n", accel_rank(l->world));
	while (fgets(line, sizeof(line), in)) {
		struct request q;

		if (sscanf(line, "%15s %llu %d %d", q.what, &q.bytes, &q.calls,
			   &q.samples) != 4 ||
		    q.bytes > most || q.calls < 1 || q.samples < 1)
			die("request", line);
		answer(l, &q, fd);
	}
	(void)fclose(in);
}

int main(int argc, char **argv)
{
	size_t bytes = argc > 1 ? (size_t)strtoull(argv[1], NULL, 10) : 0;
	struct load l = { 0 };

	if (bytes < sizeof(float)) {
		fprintf(stderr, "usage: collectives_load BYTES\n");
		return 2;
	}
	need(accel_init(&l.world));
	allocate_all(&l, bytes);
	check_sums(&l, "private", l.private, bytes);
	check_sums(&l, "arena", l.arena, bytes);
	serve(&l, bytes);
	accel_finish(l.world);
	free(l.source);
	free(l.private);
	return 0;
}
