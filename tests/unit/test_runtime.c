/*
 * Collectives, with ranks as threads over one ring: every call against what it should
 * give, what ranks get that disagree, and what becomes of those that wait for one that
 * does not come.
 *
 *     test_runtime [--small] [--seed N] [PATTERN]
 *
 * --small is for runs that are slow by themselves; PATTERN selects tests.
 */

#include "tests/unit/ranks.h"

#include <time.h>

#include "base/clock.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define IS_SLOW 1
#endif
#endif
#ifndef IS_SLOW
#define IS_SLOW 0
#endif

static bool is_small = IS_SLOW;
static uint64_t first_seed;

static const int world_sizes[] = { 1, 2, 3, 5 };

enum {
	KIB = 1024,
	SLOT = 256 * KIB, /* bytes of a slot, with this few ranks */
};

static unsigned everybody(const struct rank *r)
{
	return (1u << r->size) - 1;
}

static void run_all(void (*body)(struct rank *), const void *data)
{
	for (size_t i = 0; i < COUNT(world_sizes); i++) {
		struct ring *ring = ring_of(world_sizes[i]);
		struct rank ranks[MAX_RANKS];
		int failures = failures_over(ring, body, data, ranks);

		ring_free(ring);
		assert_int_equal(failures, 0);
		for (int k = 1; k < world_sizes[i]; k++)
			assert_int_equal(ranks[k].digest, ranks[0].digest);
	}
}

/* One program after another over the same ring. */
static void run_in_a_row(int n_ranks, void (*body)(struct rank *), int n_programs)
{
	struct ring *ring = ring_of(n_ranks);
	int failures = 0;

	for (int i = 0; i < n_programs; i++)
		failures += failures_over(ring, body, NULL, NULL);
	ring_free(ring);
	assert_int_equal(failures, 0);
}

/* ---- reduce ----------------------------------------------------------------------- */

static void reduce_one(struct rank *r, int dtype, int op, size_t count, uint64_t seed)
{
	void *data = fenced(dtype, count);
	struct accel_array a = array_of(data, dtype, count);

	fill(dtype, data, count, seed, r->number);
	CHECK_OK(r, accel_reduce(r->world, &a, op));
	check_reduced(r, dtype, op, data, count, seed, everybody(r),
		      op == ACCEL_MEAN ? r->size : 1);
	free_fenced(r, data, dtype, count);
}

/* Bytes around everything that changes how data travels. */
static const size_t edges[] = { 0,    4,        8 * KIB,  16 * KIB,  128 * KIB,
				SLOT, 3 * SLOT, 8 * SLOT, 6000 * KIB };

static size_t n_edges(void)
{
	return COUNT(edges) - (is_small ? 2 : 0);
}

static void reduce_around_edges(struct rank *r)
{
	for (size_t i = 0; i < n_edges(); i++) {
		size_t count = edges[i] / sizeof(float);

		for (size_t c = count ? count - 1 : 0; c <= count + 1; c++)
			reduce_one(r, ACCEL_FLOAT32, ACCEL_SUM, c, edges[i] + c);
	}
}

static void a_reduction_of_any_size_is_that_of_its_elements(void **state)
{
	(void)state;
	run_all(reduce_around_edges, NULL);
}

static void reduce_everything(struct rank *r)
{
	static const size_t counts[] = { 1, 7, 4095, 8193, 70001 };
	size_t n = COUNT(counts) - (is_small ? 1 : 0);

	for (int d = 0; d < N_ALL_DTYPES; d++)
		for (int op = ACCEL_SUM; op <= ACCEL_MAX; op++)
			for (size_t c = 0; c < n; c++)
				if (op != ACCEL_MEAN || is_floating(all_dtypes[d]))
					reduce_one(r, all_dtypes[d], op, counts[c],
						   (uint64_t)op * 100 + c);
}

static void a_reduction_works_for_every_dtype_and_operation(void **state)
{
	(void)state;
	run_all(reduce_everything, NULL);
}

static void reduce_shapes(struct rank *r)
{
	float data[24];
	struct accel_array a = { data, ACCEL_FLOAT32, 0, { 0 } };

	fill(ACCEL_FLOAT32, data, 24, 1, r->number);
	CHECK_OK(r, accel_reduce(r->world, &a, ACCEL_SUM));
	check_reduced(r, ACCEL_FLOAT32, ACCEL_SUM, data, 1, 1, everybody(r), 1);
	fill(ACCEL_FLOAT32, data, 24, 2, r->number);
	a = (struct accel_array){ data, ACCEL_FLOAT32, 8, { 1, 2, 1, 3, 1, 4, 1, 1 } };
	CHECK_OK(r, accel_reduce(r->world, &a, ACCEL_MAX));
	check_reduced(r, ACCEL_FLOAT32, ACCEL_MAX, data, 24, 2, everybody(r), 1);
	a = (struct accel_array){ NULL, ACCEL_FLOAT32, 3, { 2, 0, 3 } };
	CHECK_OK(r, accel_reduce(r->world, &a, ACCEL_SUM));
}

static void an_array_of_any_shape_is_reduced(void **state)
{
	(void)state;
	run_all(reduce_shapes, NULL);
}

/* ---- broadcast -------------------------------------------------------------------- */

static void broadcast_one(struct rank *r, size_t bytes, int root)
{
	uint8_t *data = fenced(ACCEL_UINT8, bytes);
	struct accel_array a = array_of(data, ACCEL_UINT8, bytes);
	uint64_t seed = bytes + (uint64_t)root;

	fill(ACCEL_UINT8, data, bytes, seed, r->number);
	CHECK_OK(r, accel_broadcast(r->world, &a, root));
	check_reduced(r, ACCEL_UINT8, ACCEL_SUM, data, bytes, seed, 1u << root, 1);
	free_fenced(r, data, ACCEL_UINT8, bytes);
}

static void broadcast_around_edges(struct rank *r)
{
	for (size_t i = 0; i < n_edges(); i++)
		for (int root = 0; root < r->size; root++)
			if (edges[i] < 4 * SLOT || root == r->size - 1)
				broadcast_one(r, edges[i] + (size_t)root, root);
}

static void a_broadcast_of_any_size_gives_all_what_its_root_has(void **state)
{
	(void)state;
	run_all(broadcast_around_edges, NULL);
}

/* ---- gather ----------------------------------------------------------------------- */

struct rows {
	const char *what;
	uint64_t width;
	uint64_t rows[5]; /* of each rank */
};

static const struct rows ragged[] = {
	{ "equal ones", 10, { 64, 64, 64, 64, 64 } },
	{ "different ones", 3, { 1, 2, 3, 4, 5 } },
	{ "none on the first", 5, { 0, 7, 1, 0, 9 } },
	{ "none on the others", 5, { 3, 0, 0, 0, 0 } },
	{ "none at all", 5, { 0, 0, 0, 0, 0 } },
	{ "without width", 0, { 4, 5, 6, 7, 8 } },
	{ "one slot and more", 4, { 16384, 16385, 16383, 1, 0 } },
	{ "several slots of one rank", 4, { 1, 150001, 2, 0, 3 } },
	{ "several slots of each", 1, { 200001, 70001, 131072, 65536, 65537 } },
};

static void gather_ragged(struct rank *r, const struct rows *t, bool wants_it)
{
	uint64_t rows[MAX_RANKS], before = 0, all = 0;
	size_t count = t->rows[r->number] * t->width;
	float *own = fenced(ACCEL_FLOAT32, count), *out;
	struct accel_array a = {
		own, ACCEL_FLOAT32, 2, { t->rows[r->number], t->width }
	};

	for (int k = 0; k < r->size; k++)
		all += t->rows[k] * t->width;
	out = fenced(ACCEL_FLOAT32, all);
	fill(ACCEL_FLOAT32, own, count, t->width, r->number);
	CHECK_OK(r, accel_gather(r->world, &a, rows));
	for (int k = 0; k < r->size; k++)
		CHECK(r, rows[k] == t->rows[k]);
	CHECK_OK(r, accel_gather_into(r->world, wants_it ? out : NULL));
	for (int k = 0; k < r->size && wants_it; k++) {
		check_reduced(r, ACCEL_FLOAT32, ACCEL_SUM, out + before,
			      t->rows[k] * t->width, t->width, 1u << k, 1);
		before += t->rows[k] * t->width;
	}
	free_fenced(r, own, ACCEL_FLOAT32, count);
	free_fenced(r, out, ACCEL_FLOAT32, all);
}

static void gather_all_ragged(struct rank *r)
{
	for (size_t i = 0; i < COUNT(ragged); i++)
		gather_ragged(r, &ragged[i], true);
}

static void gathered_rows_lie_in_the_order_of_ranks(void **state)
{
	(void)state;
	run_all(gather_all_ragged, NULL);
}

static void gather_for_the_last(struct rank *r)
{
	for (size_t i = 0; i < COUNT(ragged); i++)
		gather_ragged(r, &ragged[i], r->number == r->size - 1);
}

static void a_rank_may_decline_what_was_gathered(void **state)
{
	(void)state;
	run(3, gather_for_the_last, NULL);
}

static void gather_scalars(struct rank *r)
{
	int64_t own = 100 + r->number, out[MAX_RANKS] = { 0 };
	struct accel_array a = { &own, ACCEL_INT64, 0, { 0 } };
	uint64_t rows[MAX_RANKS];

	CHECK_OK(r, accel_gather(r->world, &a, rows));
	CHECK_OK(r, accel_gather_into(r->world, out));
	for (int k = 0; k < r->size; k++)
		CHECK(r, rows[k] == 1 && out[k] == 100 + k);
	/* Beside the rows of others. */
	a = (struct accel_array){ &own, ACCEL_INT64, r->number ? 1 : 0, { 1 } };
	CHECK_OK(r, accel_gather(r->world, &a, rows));
	CHECK_OK(r, accel_gather_into(r->world, out));
	for (int k = 0; k < r->size; k++)
		CHECK(r, rows[k] == 1 && out[k] == 100 + k);
}

static void a_scalar_is_gathered_as_one_row(void **state)
{
	(void)state;
	run_all(gather_scalars, NULL);
}

/* ---- models ----------------------------------------------------------------------- */

struct parameter {
	int dtype;
	size_t count;
};

static const struct parameter parameters[] = {
	{ ACCEL_FLOAT32, 1 },     { ACCEL_FLOAT32, 0 },      { ACCEL_BFLOAT16, 33 },
	{ ACCEL_FLOAT32, 2048 },  { ACCEL_FLOAT64, 7 },      { ACCEL_FLOAT16, 5 },
	{ ACCEL_FLOAT32, 4097 },  { ACCEL_FLOAT16, 0 },      { ACCEL_FLOAT16, 8191 },
	{ ACCEL_FLOAT32, 70001 }, { ACCEL_FLOAT64, 33333 },  { ACCEL_FLOAT32, 3 },
	{ ACCEL_INT64, 4 },       { ACCEL_BFLOAT16, 20001 }, { ACCEL_BOOL, 0 },
};
enum { N_PARAMETERS = COUNT(parameters) };

struct memory {
	struct accel_array arrays[N_PARAMETERS];
};

static void memory_init(struct memory *m, uint64_t seed, int rank)
{
	for (size_t i = 0; i < N_PARAMETERS; i++) {
		const struct parameter *p = &parameters[i];

		m->arrays[i] = array_of(fenced(p->dtype, p->count), p->dtype, p->count);
		fill(p->dtype, m->arrays[i].data, p->count, seed + i, rank);
	}
}

static void memory_fini(struct rank *r, struct memory *m)
{
	for (size_t i = 0; i < N_PARAMETERS; i++)
		free_fenced(r, m->arrays[i].data, parameters[i].dtype,
			    parameters[i].count);
}

static void prepare_one(struct rank *r, int flags)
{
	struct accel_model *model = NULL;
	struct memory m;
	unsigned whose = flags & ACCEL_KEEP ? 1u << r->number : 1;

	memory_init(&m, 7, r->number);
	CHECK_OK(r, accel_prepare(r->world, m.arrays, N_PARAMETERS, flags, &model));
	for (size_t i = 0; i < N_PARAMETERS; i++)
		check_reduced(r, parameters[i].dtype, ACCEL_SUM, m.arrays[i].data,
			      parameters[i].count, 7 + i, whose, 1);
	accel_model_free(model);
	memory_fini(r, &m);
}

static void prepare_both_ways(struct rank *r)
{
	prepare_one(r, 0);
	prepare_one(r, ACCEL_KEEP);
	r->digest = 0; /* what was kept differs */
}

static void a_model_begins_with_the_parameters_of_rank_0_unless_kept(void **state)
{
	(void)state;
	run_all(prepare_both_ways, NULL);
}

/* Whether @rank has a gradient for parameter @i, in several patterns. */
static bool has_gradient(int pattern, int rank, size_t i)
{
	uint64_t h = ((uint64_t)rank * 31 + i + 1) * UINT64_C(0x9e3779b97f4a7c15);

	switch (pattern) {
	case 0: /* all have all */
		return true;
	case 1: /* none has any */
		return false;
	case 2: /* only the first */
		return rank == 0;
	case 3: /* one each */
		return (size_t)rank == i;
	case 4: /* all but the last have the even ones */
		return i % 2 == 0 && rank != 1;
	default:
		return h >> (pattern + 32) & 1;
	}
}

enum { N_PATTERNS = 9 };

struct gradients {
	void *list[N_PARAMETERS];
	unsigned who[N_PARAMETERS]; /* ranks that have one, a bit each */
	uint64_t missing[N_PARAMETERS];
	int n_missing; /* here, where others have them */
	uint64_t seed;
};

/* @active: the ranks that take part. */
static void gradients_init(struct gradients *g, struct rank *r, int pattern,
			   unsigned active, uint64_t seed)
{
	*g = (struct gradients){ .seed = seed };
	for (size_t i = 0; i < N_PARAMETERS; i++) {
		const struct parameter *p = &parameters[i];

		if (!is_floating(p->dtype))
			continue;
		for (int k = 0; k < r->size; k++)
			if (active >> k & 1 && has_gradient(pattern, k, i))
				g->who[i] |= 1u << k;
		if (g->who[i] >> r->number & 1) {
			g->list[i] = fenced(p->dtype, p->count);
			fill(p->dtype, g->list[i], p->count, seed + i, r->number);
		} else if (g->who[i]) {
			g->missing[g->n_missing++] = i;
		}
	}
}

static void gradients_add_missing(struct gradients *g)
{
	for (int k = 0; k < g->n_missing; k++) {
		const struct parameter *p = &parameters[g->missing[k]];

		g->list[g->missing[k]] = fenced(p->dtype, p->count);
		memset(g->list[g->missing[k]], 0, p->count * dtype_size(p->dtype));
	}
}

static void gradients_check(struct rank *r, const struct gradients *g)
{
	for (size_t i = 0; i < N_PARAMETERS; i++) {
		const struct parameter *p = &parameters[i];

		CHECK(r, !g->who[i] == !g->list[i]);
		if (g->list[i])
			check_reduced(r, p->dtype, ACCEL_SUM, g->list[i], p->count,
				      g->seed + i, g->who[i], r->size);
	}
}

static void gradients_fini(struct gradients *g, struct rank *r)
{
	for (size_t i = 0; i < N_PARAMETERS; i++)
		if (g->list[i])
			free_fenced(r, g->list[i], parameters[i].dtype,
				    parameters[i].count);
}

/* One accel_backward(), twice where gradients are missing here. */
static void backward_once(struct rank *r, accel_model *model, int pattern,
			  unsigned active, uint64_t seed)
{
	struct gradients g;

	gradients_init(&g, r, pattern, active, seed);
	CHECK_CODE(r, accel_backward(model, g.list), g.n_missing);
	for (int k = 0; k < g.n_missing; k++)
		CHECK(r, accel_missing(model)[k] == g.missing[k]);
	if (g.n_missing) {
		gradients_add_missing(&g);
		CHECK_OK(r, accel_backward(model, g.list));
	}
	gradients_check(r, &g);
	gradients_fini(&g, r);
}

static void backward_all_patterns(struct rank *r)
{
	struct accel_model *model = NULL;
	struct memory m;

	memory_init(&m, 7, 0);
	CHECK_OK(r, accel_prepare(r->world, m.arrays, N_PARAMETERS, ACCEL_KEEP, &model));
	for (int pattern = 0; pattern < N_PATTERNS; pattern++)
		backward_once(r, model, pattern, everybody(r), (uint64_t)pattern * 50);
	memory_fini(r, &m);
}

static void gradients_are_averaged_whoever_has_them(void **state)
{
	(void)state;
	run_all(backward_all_patterns, NULL);
}

/* A model of many parameters, of which a rank has every nth. */
static void backward_of_many(struct rank *r)
{
	enum { N = 5000 };
	struct accel_array *arrays = calloc(N, sizeof(*arrays));
	void **list = calloc(N, sizeof(*list));
	float *memory = calloc(N, sizeof(*memory));
	struct accel_model *model = NULL;
	int missing = 0;

	for (size_t i = 0; i < N; i++) {
		arrays[i] = array_of(&memory[i], ACCEL_FLOAT32, i % 7 ? 1 : 0);
		list[i] = i % (size_t)(r->number + 2) ? NULL : &memory[i];
		memory[i] = list[i] ? (float)r->size : 0;
	}
	CHECK_OK(r, accel_prepare(r->world, arrays, N, ACCEL_KEEP, &model));
	missing = accel_backward(model, list);
	CHECK(r, missing > 0);
	for (int k = 0; k < missing; k++)
		list[accel_missing(model)[k]] = &memory[accel_missing(model)[k]];
	CHECK_OK(r, accel_backward(model, list));
	for (size_t i = 0; i < N; i++) {
		float want = 0;

		for (size_t k = 2; k < (size_t)r->size + 2; k++)
			want += i % k ? 0 : 1;
		if (i % 7)
			CHECK(r, memory[i] == want);
	}
	free(arrays);
	free(list);
	free(memory);
}

static void a_model_may_have_thousands_of_parameters(void **state)
{
	(void)state;
	run(2, backward_of_many, NULL);
	run(3, backward_of_many, NULL);
}

static void backward_wrongly(struct rank *r)
{
	struct accel_model *model = NULL, *other = NULL;
	struct memory m;
	struct gradients g;

	memory_init(&m, 7, 0);
	CHECK_OK(r, accel_prepare(r->world, m.arrays, N_PARAMETERS, ACCEL_KEEP, &model));
	CHECK_OK(r, accel_prepare(r->world, m.arrays, 2, ACCEL_KEEP, &other));
	CHECK_CODE(r, accel_backward(NULL, g.list), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_backward(model, NULL), ACCEL_E_INVALID);
	gradients_init(&g, r, 2, everybody(r), 1);
	CHECK_CODE(r, accel_backward(model, g.list), g.n_missing);
	if (g.n_missing) {
		void *out;

		CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_INVALID);
		CHECK(r, strstr(accel_error(), "accel_backward() again"));
		CHECK_CODE(r, accel_join(r->world), ACCEL_E_INVALID);
		CHECK_CODE(r, accel_should_stop(r->world), ACCEL_E_INVALID);
		CHECK_CODE(r, accel_alloc(r->world, 64, &out), ACCEL_E_INVALID);
		CHECK_CODE(r, accel_backward(other, g.list), ACCEL_E_INVALID);
		CHECK_CODE(r, accel_backward(model, g.list), ACCEL_E_INVALID);
		CHECK(r, strstr(accel_error(), "parameter 0"));
		gradients_add_missing(&g);
		CHECK_OK(r, accel_backward(model, g.list));
	}
	gradients_check(r, &g);
	gradients_fini(&g, r);
	CHECK_OK(r, accel_barrier(r->world));
	memory_fini(r, &m);
}

static void between_the_two_calls_of_backward_nothing_else_may_be_called(void **state)
{
	(void)state;
	run(3, backward_wrongly, NULL);
}

static void prepare_twice(struct rank *r)
{
	struct accel_model *models[3] = { 0 };
	struct memory m;

	memory_init(&m, 7, 0);
	for (int i = 0; i < 3; i++)
		CHECK_OK(r, accel_prepare(r->world, m.arrays, N_PARAMETERS, ACCEL_KEEP,
					  &models[i]));
	accel_model_free(models[1]);
	accel_model_free(NULL);
	backward_once(r, models[2], 5, everybody(r), 1);
	backward_once(r, models[0], 6, everybody(r), 2);
	accel_model_free(models[2]);
	backward_once(r, models[0], 7, everybody(r), 3);
	memory_fini(r, &m); /* the last model is the world's to free */
}

static void a_world_has_several_models(void **state)
{
	(void)state;
	run_all(prepare_twice, NULL);
}

/* ---- the loss scale --------------------------------------------------------------- */

static void unscale(struct rank *r, accel_model *model, float *gradient, int want)
{
	void *list[] = { gradient, NULL };

	CHECK_CODE(r, accel_unscale(model, list), want);
}

static void scale_losses(struct rank *r)
{
	float memory[4] = { 0 }, gradient[4] = { 65536, -1, 0, 131072 };
	struct accel_array arrays[] = { array_of(memory, ACCEL_FLOAT32, 4),
					array_of(memory, ACCEL_FLOAT32, 2) };
	struct accel_model *model = NULL;

	CHECK_OK(r, accel_prepare(r->world, arrays, 2, ACCEL_KEEP, &model));
	CHECK(r, accel_loss_scale(model) == 65536);
	unscale(r, model, gradient, 0);
	CHECK(r, gradient[0] == 1 && gradient[3] == 2 && gradient[1] == -1.0f / 65536);
	gradient[2] = INFINITY;
	unscale(r, model, gradient, 1);
	CHECK(r, accel_loss_scale(model) == 32768);
	gradient[2] = NAN;
	unscale(r, model, gradient, 1);
	CHECK(r, accel_loss_scale(model) == 16384);
	for (int i = 0; i < 1999; i++)
		unscale(r, model, (float[]){ 1, 1, 1, 1 }, 0);
	CHECK(r, accel_loss_scale(model) == 16384);
	unscale(r, model, (float[]){ 1, 1, 1, 1 }, 0);
	CHECK(r, accel_loss_scale(model) == 32768);
	/* An overflow begins the count again. */
	for (int i = 0; i < 1500; i++)
		unscale(r, model, (float[]){ 1, 1, 1, 1 }, 0);
	unscale(r, model, (float[]){ 1, 1, INFINITY, 1 }, 1);
	for (int i = 0; i < 1999; i++)
		unscale(r, model, (float[]){ 1, 1, 1, 1 }, 0);
	CHECK(r, accel_loss_scale(model) == 16384);
	for (int i = 0; i < 100; i++)
		unscale(r, model, (float[]){ 1, -INFINITY, 1, 1 }, 1);
	CHECK(r, accel_loss_scale(model) == 1);
	CHECK_CODE(r, accel_unscale(NULL, NULL), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_unscale(model, NULL), ACCEL_E_INVALID);
}

static void the_loss_scale_halves_at_an_overflow_and_grows_after_2000_steps(void **state)
{
	(void)state;
	run(2, scale_losses, NULL);
}

/* ---- memory of the arenas --------------------------------------------------------- */

static void alloc_and_reduce(struct rank *r)
{
	static const size_t counts[] = { 1, 16, 17, 1000, 65536, 300001 };
	float *memory = NULL;
	const size_t count = 300001;

	CHECK_OK(r, accel_alloc(r->world, count * sizeof(float), (void **)&memory));
	if (!CHECK(r, memory && (uintptr_t)memory % 64 == 0))
		return;
	for (size_t i = 0; i < count; i++)
		if (!CHECK(r, memory[i] == 0))
			break;
	for (size_t c = 0; c < COUNT(counts); c++)
		for (size_t at = 0; at < 3 && at + counts[c] <= count; at++) {
			struct accel_array a =
				array_of(memory + at, ACCEL_FLOAT32, counts[c]);
			int op = (int)at + 1;

			fill(ACCEL_FLOAT32, a.data, counts[c], c, r->number);
			CHECK_OK(r, accel_reduce(r->world, &a, op));
			check_reduced(r, ACCEL_FLOAT32, op, a.data, counts[c], c,
				      everybody(r), op == ACCEL_MEAN ? r->size : 1);
		}
}

static void memory_of_the_arenas_is_zeroed_aligned_and_reduced_in_place(void **state)
{
	(void)state;
	run_all(alloc_and_reduce, NULL);
}

/* Gradients in two regions, and some of them elsewhere. */
static void backward_in_arenas(struct rank *r)
{
	enum { A = 1000, B = 33333, C = 77 };
	float *a = NULL, *b = NULL, c[C];
	struct accel_array arrays[] = { array_of(NULL, ACCEL_FLOAT32, A),
					array_of(NULL, ACCEL_FLOAT32, B),
					array_of(NULL, ACCEL_FLOAT32, C) };
	struct accel_model *model = NULL;

	CHECK_OK(r, accel_alloc(r->world, A * sizeof(float), (void **)&a));
	CHECK_OK(r, accel_alloc(r->world, B * sizeof(float), (void **)&b));
	CHECK_OK(r, accel_prepare(r->world, arrays, 3, ACCEL_KEEP, &model));
	if (!a || !b)
		return;
	for (int with_c = 0; with_c < 2; with_c++) {
		void *list[] = { a, b, with_c ? c : NULL };

		fill(ACCEL_FLOAT32, a, A, 1, r->number);
		fill(ACCEL_FLOAT32, b, B, 2, r->number);
		fill(ACCEL_FLOAT32, c, C, 3, r->number);
		CHECK_OK(r, accel_backward(model, list));
		check_reduced(r, ACCEL_FLOAT32, ACCEL_SUM, a, A, 1, everybody(r),
			      r->size);
		check_reduced(r, ACCEL_FLOAT32, ACCEL_SUM, b, B, 2, everybody(r),
			      r->size);
		if (with_c)
			check_reduced(r, ACCEL_FLOAT32, ACCEL_SUM, c, C, 3, everybody(r),
				      r->size);
	}
}

static void gradients_may_lie_in_several_regions_of_the_arenas(void **state)
{
	(void)state;
	run_all(backward_in_arenas, NULL);
}

static void alloc_wrongly(struct rank *r)
{
	void *memory = NULL;
	int64_t one = 1;
	struct accel_array a = { &one, ACCEL_INT64, 0, { 0 } };

	CHECK_CODE(r, accel_alloc(r->world, 0, &memory), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_alloc(r->world, UINT64_MAX, &memory), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_alloc(r->world, UINT64_C(1) << 50, &memory), ACCEL_E_MEMORY);
	CHECK(r, strstr(accel_error(), "1125899906842624 bytes"));
	CHECK(r, !memory);
	CHECK_OK(r, accel_alloc(r->world, 4096, &memory));
	CHECK_OK(r, accel_reduce(r->world, &a, ACCEL_SUM));
	CHECK(r, one == r->size);
}

static void an_arena_too_large_for_memory_is_refused_on_all_ranks(void **state)
{
	(void)state;
	run_all(alloc_wrongly, NULL);
}

static void use_second_hand_memory(struct rank *r)
{
	enum { N = 10000 };
	uint8_t *memory = NULL;

	CHECK_OK(r, accel_alloc(r->world, N, (void **)&memory));
	for (size_t i = 0; memory && i < N; i++)
		if (!CHECK(r, memory[i] == 0))
			break;
	if (memory)
		memset(memory, 0x5a, N);
	CHECK_OK(r, accel_barrier(r->world));
}

/* A wrapper may run one program after another in the place of a rank. */
static void memory_is_zeroed_for_the_next_program_too(void **state)
{
	(void)state;
	run_in_a_row(2, use_second_hand_memory, 2);
}

/* ---- joining ---------------------------------------------------------------------- */

/* Rank 0 has nothing left to do. */
static void others_do_everything(struct rank *r)
{
	unsigned others = everybody(r) & ~1u;
	struct rows uneven = { "rows", 4, { 0, 5, 70000, 1, 2 } };
	struct accel_model *model = NULL;
	struct memory m;

	memory_init(&m, 7, 0);
	CHECK_OK(r, accel_prepare(r->world, m.arrays, N_PARAMETERS, ACCEL_KEEP, &model));
	if (r->number) {
		static const size_t counts[] = { 1, 5000, 100001 };

		CHECK_OK(r, accel_barrier(r->world));
		CHECK_CODE(r, accel_should_stop(r->world), 0);
		for (size_t c = 0; c < COUNT(counts); c++)
			for (int op = ACCEL_SUM; op <= ACCEL_MAX; op++) {
				float *data = fenced(ACCEL_FLOAT32, counts[c]);
				struct accel_array a =
					array_of(data, ACCEL_FLOAT32, counts[c]);

				fill(ACCEL_FLOAT32, data, counts[c], c, r->number);
				CHECK_OK(r, accel_reduce(r->world, &a, op));
				check_reduced(r, ACCEL_FLOAT32, op, data, counts[c], c,
					      others, op == ACCEL_MEAN ? r->size - 1 : 1);
				free_fenced(r, data, ACCEL_FLOAT32, counts[c]);
			}
		broadcast_one(r, 600000, 1);
		gather_ragged(r, &uneven, true);
		for (int pattern = 0; pattern < N_PATTERNS; pattern++)
			backward_once(r, model, pattern, others, 3);
	}
	CHECK_OK(r, accel_join(r->world));
	reduce_one(r, ACCEL_FLOAT32, ACCEL_MEAN, 1000, 9);
	CHECK_OK(r, accel_join(r->world));
	memory_fini(r, &m);
}

static void
a_rank_that_has_joined_adds_nothing_and_counts_as_zero_for_gradients(void **state)
{
	(void)state;
	for (int n = 1; n <= 5; n++)
		run(n, others_do_everything, NULL);
}

static void broadcast_from_joined(struct rank *r)
{
	uint8_t data[] = { (uint8_t)r->number, 7 };
	struct accel_array a = array_of(data, ACCEL_UINT8, 2);

	if (r->number) {
		CHECK_CODE(r, accel_broadcast(r->world, &a, 0), ACCEL_E_MISMATCH);
		CHECK(r, strstr(accel_error(), "rank 0"));
		CHECK(r, data[0] == r->number && data[1] == 7);
		CHECK_OK(r, accel_barrier(r->world));
	}
	CHECK_OK(r, accel_join(r->world));
	CHECK_OK(r, accel_broadcast(r->world, &a, 0));
	CHECK(r, data[0] == 0);
}

static void a_broadcast_from_a_rank_that_has_joined_fails_on_the_others(void **state)
{
	(void)state;
	run(2, broadcast_from_joined, NULL);
	run(4, broadcast_from_joined, NULL);
}

/* Nothing comes from rank 0 that has joined, but what is kept needs nothing. */
static void prepare_beside_joined(struct rank *r)
{
	float data[2] = { (float)r->number, 1 };
	struct accel_array a = array_of(data, ACCEL_FLOAT32, 2);
	struct accel_model *model = NULL;
	void *list[] = { data };

	if (r->number) {
		CHECK_CODE(r, accel_prepare(r->world, &a, 1, 0, &model),
			   ACCEL_E_MISMATCH);
		CHECK(r, strstr(accel_error(), "rank 0"));
		CHECK(r, data[0] == (float)r->number);
		CHECK_OK(r, accel_prepare(r->world, &a, 1, ACCEL_KEEP, &model));
		if (model)
			CHECK_OK(r, accel_backward(model, list));
	}
	CHECK_OK(r, accel_join(r->world));
	CHECK_OK(r, accel_barrier(r->world));
}

static void a_model_is_prepared_beside_a_joined_rank_0_only_if_kept(void **state)
{
	(void)state;
	run(2, prepare_beside_joined, NULL);
	run(3, prepare_beside_joined, NULL);
}

static void mismatch_beside_joined(struct rank *r)
{
	int64_t one = 1;
	struct accel_array a = { &one, ACCEL_INT64, 0, { 0 } };

	if (r->number)
		CHECK_CODE(r,
			   r->number == 1 ? accel_barrier(r->world)
					  : accel_reduce(r->world, &a, ACCEL_SUM),
			   ACCEL_E_MISMATCH);
	CHECK_OK(r, accel_join(r->world));
	CHECK_OK(r, accel_barrier(r->world));
}

static void ranks_that_disagree_do_not_disturb_one_that_has_joined(void **state)
{
	(void)state;
	run(3, mismatch_beside_joined, NULL);
	run(5, mismatch_beside_joined, NULL);
}

/* What one rank did not allocate with the others must not become another's place. */
static void alloc_beside_joined(struct rank *r)
{
	float *first = NULL, *second = NULL;
	struct accel_array a = array_of(NULL, ACCEL_FLOAT32, 1000);
	int allocated = 0;

	if (r->number) {
		allocated = accel_alloc(r->world, 8192, (void **)&first);
		a.data = first;
		if (!allocated) {
			fill(ACCEL_FLOAT32, first, 1000, 1, r->number);
			CHECK_OK(r, accel_reduce(r->world, &a, ACCEL_SUM));
			check_reduced(r, ACCEL_FLOAT32, ACCEL_SUM, first, 1000, 1,
				      everybody(r) & ~1u, 1);
		}
	}
	CHECK_OK(r, accel_join(r->world));
	CHECK_OK(r, accel_alloc(r->world, 4096, (void **)&second));
	a.data = second;
	if (!second)
		return;
	fill(ACCEL_FLOAT32, second, 1000, 2, r->number);
	CHECK_OK(r, accel_reduce(r->world, &a, ACCEL_SUM));
	check_reduced(r, ACCEL_FLOAT32, ACCEL_SUM, second, 1000, 2, everybody(r), 1);
	if (r->number && !allocated) /* nobody wrote over it */
		check_reduced(r, ACCEL_FLOAT32, ACCEL_SUM, first, 1000, 1,
			      everybody(r) & ~1u, 1);
}

static void memory_is_allocated_while_a_rank_has_joined_and_after(void **state)
{
	(void)state;
	run(2, alloc_beside_joined, NULL);
	run(3, alloc_beside_joined, NULL);
}

static void work_longer_than_the_timeout(struct rank *r)
{
	uint64_t end = now_ms() + 1600;

	while (r->number && now_ms() < end) {
		struct timespec work = { 0, 200 * 1000 * 1000 };

		(void)nanosleep(&work, NULL);
		CHECK_OK(r, accel_barrier(r->world));
	}
	CHECK_OK(r, accel_join(r->world));
	CHECK_OK(r, accel_barrier(r->world));
}

static void a_rank_that_has_joined_waits_as_long_as_the_others_go_on(void **state)
{
	(void)state;
	assert_int_equal(setenv("ACCEL_TIMEOUT", "1", 1), 0);
	run(2, work_longer_than_the_timeout, NULL);
}

/* ---- ranks that want different things --------------------------------------------- */

enum what { BARRIER, REDUCE, BROADCAST, GATHER, PREPARE, BACKWARD, ALLOC, STOP };

struct wish {
	enum what what;
	int dtype, op; /* or root, flags, which model */
	int n_dims;
	uint64_t dims[3];
};

static const struct mismatch {
	struct wish even, odd;      /* of ranks with such numbers */
	const char *first, *second; /* what is said of ranks 0 and 1 */
} mismatches[] = {
	{ { BARRIER },
	  { REDUCE, ACCEL_FLOAT32, ACCEL_SUM, 2, { 2, 3 } },
	  "barrier",
	  "reduce of float32 (2, 3) by sum" },
	{ { GATHER, ACCEL_INT64, 0, 1, { 4 } },
	  { BARRIER },
	  "gather of int64 (4,)",
	  "barrier" },
	{ { STOP }, { BARRIER }, "should_stop", "barrier" },
	{ { ALLOC, .dims = { 64 } }, { STOP }, "alloc of 64 bytes", "should_stop" },
	{ { BACKWARD },
	  { REDUCE, ACCEL_FLOAT32, ACCEL_SUM, 1, { 6 } },
	  "backward with 2 parameters of 6 elements",
	  "reduce of float32 (6,) by sum" },
	{ { PREPARE },
	  { BROADCAST, ACCEL_FLOAT32, 0, 1, { 6 } },
	  "prepare with 2 parameters of 6 elements",
	  "broadcast of float32 (6,) from rank 0" },
	{ { REDUCE, ACCEL_FLOAT32, ACCEL_SUM, 1, { 3 } },
	  { REDUCE, ACCEL_FLOAT64, ACCEL_SUM, 1, { 3 } },
	  "reduce of float32 (3,) by sum",
	  "reduce of float64 (3,) by sum" },
	{ { REDUCE, ACCEL_INT32, ACCEL_MIN, 1, { 3 } },
	  { REDUCE, ACCEL_INT32, ACCEL_MAX, 1, { 3 } },
	  "by min",
	  "by max" },
	{ { REDUCE, ACCEL_UINT8, ACCEL_SUM, 2, { 2, 3 } },
	  { REDUCE, ACCEL_UINT8, ACCEL_SUM, 2, { 3, 2 } },
	  "uint8 (2, 3)",
	  "uint8 (3, 2)" },
	{ { REDUCE, ACCEL_FLOAT16, ACCEL_MEAN, 1, { 6 } },
	  { REDUCE, ACCEL_FLOAT16, ACCEL_MEAN, 2, { 6, 1 } },
	  "float16 (6,) by mean",
	  "float16 (6, 1) by mean" },
	{ { REDUCE, ACCEL_BOOL, ACCEL_SUM, 0, { 0 } },
	  { REDUCE, ACCEL_BOOL, ACCEL_SUM, 1, { 1 } },
	  "bool () by sum",
	  "bool (1,) by sum" },
	{ { REDUCE, ACCEL_FLOAT32, ACCEL_SUM, 1, { 100000 } },
	  { REDUCE, ACCEL_FLOAT32, ACCEL_SUM, 1, { 100001 } },
	  "(100000,)",
	  "(100001,)" },
	{ { BROADCAST, ACCEL_INT8, 0, 1, { 3 } },
	  { BROADCAST, ACCEL_INT8, 1, 1, { 3 } },
	  "from rank 0",
	  "from rank 1" },
	{ { BROADCAST, ACCEL_INT16, 0, 1, { 3 } },
	  { BROADCAST, ACCEL_INT16, 0, 1, { 300000 } },
	  "int16 (3,)",
	  "int16 (300000,)" },
	{ { GATHER, ACCEL_FLOAT32, 0, 2, { 5, 10 } },
	  { GATHER, ACCEL_FLOAT32, 0, 2, { 5, 11 } },
	  "gather of float32 (5, 10)",
	  "gather of float32 (5, 11)" },
	{ { GATHER, ACCEL_FLOAT32, 0, 2, { 0, 10 } },
	  { GATHER, ACCEL_BFLOAT16, 0, 2, { 5, 10 } },
	  "gather of float32 (0, 10)",
	  "gather of bfloat16 (5, 10)" },
	{ { GATHER, ACCEL_FLOAT32, 0, 0, { 0 } },
	  { GATHER, ACCEL_FLOAT32, 0, 2, { 1, 1 } },
	  "gather of float32 (1,)",
	  "gather of float32 (1, 1)" },
	{ { PREPARE, .op = 0 },
	  { PREPARE, .op = 1 },
	  "2 parameters of 6 elements",
	  "1 parameters of 6 elements" },
	{ { PREPARE, .op = 0 },
	  { PREPARE, .op = 2 },
	  "rank 0: prepare with 2 parameters of 6 elements",
	  "rank 1: prepare with 2 parameters of 6 elements" },
	{ { PREPARE, .op = 0 },
	  { PREPARE, .op = 3 },
	  "rank 0: prepare with 2 parameters of 6 elements",
	  "order, shapes, dtypes" },
	{ { PREPARE, .op = 0 },
	  { PREPARE, .op = 0, .dtype = ACCEL_KEEP },
	  "6 elements\n",
	  "6 elements, keeping its values" },
	{ { BACKWARD, .op = 0 },
	  { BACKWARD, .op = 1 },
	  "backward with 2 parameters",
	  "backward with 1 parameters" },
	{ { ALLOC, .dims = { 4096 } },
	  { ALLOC, .dims = { 4097 } },
	  "alloc of 4096 bytes",
	  "alloc of 4097 bytes" },
};

/* Models of six elements, all of them different. */
static size_t describe_model(int which, void *data, struct accel_array *arrays)
{
	arrays[0] = array_of(data, ACCEL_FLOAT32, which == 2 ? 4 : 2);
	arrays[1] = array_of(data, which == 3 ? ACCEL_FLOAT64 : ACCEL_FLOAT32,
			     which == 2 ? 2 : 4);
	if (which == 1)
		arrays[0].dims[0] = 6;
	return which == 1 ? 1 : 2;
}

struct scene {
	accel_model *models[2];
};

static int call_for(struct rank *r, const struct scene *s, const struct wish *wish,
		    uint8_t *data)
{
	struct accel_array a = { data,
				 wish->dtype,
				 wish->n_dims,
				 { wish->dims[0], wish->dims[1], wish->dims[2] } };
	struct accel_array arrays[2];
	accel_model *model;
	uint64_t rows[MAX_RANKS];
	void *memory, *list[2] = { data, data + 64 };

	switch (wish->what) {
	case BARRIER:
		return accel_barrier(r->world);
	case REDUCE:
		return accel_reduce(r->world, &a, wish->op);
	case BROADCAST:
		return accel_broadcast(r->world, &a, wish->op);
	case GATHER:
		return accel_gather(r->world, &a, rows);
	case PREPARE:
		return accel_prepare(r->world, arrays,
				     describe_model(wish->op, data, arrays), wish->dtype,
				     &model);
	case BACKWARD:
		return accel_backward(s->models[wish->op], list);
	case ALLOC:
		return accel_alloc(r->world, wish->dims[0], &memory);
	default:
		return accel_should_stop(r->world);
	}
}

static void disagree(struct rank *r)
{
	const struct mismatch *m = r->data;
	const struct wish *wish = r->number % 2 ? &m->odd : &m->even;
	const size_t size = 1 << 20;
	uint8_t *data = malloc(size), *before = malloc(size);
	struct accel_array arrays[2];
	struct scene s = { 0 };

	for (int which = 0; which < 2; which++) {
		size_t n = describe_model(which, data, arrays);

		CHECK_OK(r, accel_prepare(r->world, arrays, n, ACCEL_KEEP,
					  &s.models[which]));
	}
	fill(ACCEL_UINT8, data, size, 1, r->number);
	memcpy(before, data, size);
	CHECK_CODE(r, call_for(r, &s, wish, data), ACCEL_E_MISMATCH);
	(void)snprintf(r->text, sizeof(r->text), "%s\n", accel_error());
	CHECK(r, strstr(r->text, m->first));
	CHECK(r, strstr(r->text, m->second));
	CHECK(r, memcmp(data, before, size) == 0);
	reduce_one(r, ACCEL_FLOAT32, ACCEL_SUM, 10000, 3);
	free(data);
	free(before);
}

static void ranks_that_want_different_things_are_told_the_same_and_go_on(void **state)
{
	static const int sizes[] = { 2, 3, 5 };

	(void)state;
	for (size_t i = 0; i < COUNT(mismatches); i++)
		for (size_t k = 0; k < COUNT(sizes); k++) {
			struct ring *ring = ring_of(sizes[k]);
			struct rank ranks[MAX_RANKS];
			int failures =
				failures_over(ring, disagree, &mismatches[i], ranks);

			ring_free(ring);
			assert_int_equal(failures, 0);
			for (int rank = 1; rank < sizes[k]; rank++)
				assert_string_equal(ranks[rank].text, ranks[0].text);
		}
}

/* Call @k finds the data of rank i in its arena where bit i of @k is set, for every
 * seventh call at a place of its own. */
static void reduce_here_and_there(struct rank *r)
{
	enum { MOST = 200000 };
	static const size_t counts[] = { 1, 16, 3000, 5000, MOST };
	float *arena = NULL, *own = malloc(MOST * sizeof(*own));

	CHECK_OK(r,
		 accel_alloc(r->world, (MOST + 1024) * sizeof(float), (void **)&arena));
	for (unsigned k = 0; arena && k < 1u << r->size; k++)
		for (size_t i = 0; i < COUNT(counts); i++) {
			float *data = k >> r->number & 1 ? arena : own;
			struct accel_array a = array_of(data, ACCEL_FLOAT32, counts[i]);

			if (data == arena && (k + i) % 7 == 0)
				a.data = data += 16 * r->number;
			fill(ACCEL_FLOAT32, data, counts[i], k, r->number);
			CHECK_OK(r, accel_reduce(r->world, &a, ACCEL_SUM));
			check_reduced(r, ACCEL_FLOAT32, ACCEL_SUM, data, counts[i], k,
				      everybody(r), 1);
		}
	free(own);
}

static void data_in_the_arenas_of_some_ranks_goes_through_the_slots(void **state)
{
	(void)state;
	run(2, reduce_here_and_there, NULL);
	run(3, reduce_here_and_there, NULL);
}

/* As accel_missing() asks for it: zeroed memory of any kind, beside arenas. */
static void one_gradient_elsewhere(struct rank *r)
{
	float *arena = NULL, own[16] = { 0 };
	struct accel_array a = array_of(own, ACCEL_FLOAT32, 16);
	struct accel_model *model = NULL;
	void *list[1] = { NULL };

	CHECK_OK(r, accel_alloc(r->world, sizeof(own), (void **)&arena));
	CHECK_OK(r, accel_prepare(r->world, &a, 1, ACCEL_KEEP, &model));
	if (!arena)
		return;
	if (r->number) {
		list[0] = arena;
		for (size_t i = 0; i < 16; i++)
			arena[i] = (float)(r->size * (int)i);
		CHECK_OK(r, accel_backward(model, list));
	} else {
		CHECK_CODE(r, accel_backward(model, list), 1);
		list[0] = own;
		CHECK_OK(r, accel_backward(model, list));
	}
	for (size_t i = 0; i < 16; i++)
		CHECK(r, ((float *)list[0])[i] == (float)((r->size - 1) * (int)i));
}

static void gradients_in_the_arenas_of_some_ranks_are_averaged_as_well(void **state)
{
	(void)state;
	run(2, one_gradient_elsewhere, NULL);
	run(3, one_gradient_elsewhere, NULL);
}

/* ---- wrong arguments -------------------------------------------------------------- */

static void ask_for_nonsense(struct rank *r)
{
	float data[4] = { 1, 2, 3, 4 };
	struct accel_array good = array_of(data, ACCEL_FLOAT32, 4), bad;
	struct accel_model *model = NULL;
	uint64_t rows[MAX_RANKS];

	bad = (struct accel_array){ data, 0, 1, { 4 } };
	CHECK_CODE(r, accel_reduce(r->world, &bad, ACCEL_SUM), ACCEL_E_INVALID);
	bad.dtype = ACCEL_BOOL + 1;
	CHECK_CODE(r, accel_broadcast(r->world, &bad, 0), ACCEL_E_INVALID);
	bad.dtype = -1;
	CHECK_CODE(r, accel_gather(r->world, &bad, rows), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_prepare(r->world, &bad, 1, 0, &model), ACCEL_E_INVALID);
	bad = (struct accel_array){ data, ACCEL_FLOAT32, -1, { 4 } };
	CHECK_CODE(r, accel_reduce(r->world, &bad, ACCEL_SUM), ACCEL_E_INVALID);
	bad.n_dims = ACCEL_MAX_DIMS + 1;
	CHECK_CODE(r, accel_gather(r->world, &bad, rows), ACCEL_E_INVALID);
	bad = (struct accel_array){ data, ACCEL_FLOAT32, 2, { 1ull << 40, 1ull << 40 } };
	CHECK_CODE(r, accel_broadcast(r->world, &bad, 0), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_prepare(r->world, &bad, 1, 0, &model), ACCEL_E_INVALID);
	bad = (struct accel_array){ NULL, ACCEL_FLOAT32, 1, { 4 } };
	CHECK_CODE(r, accel_reduce(r->world, &bad, ACCEL_SUM), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_prepare(r->world, &bad, 1, 0, &model), ACCEL_E_INVALID);
	bad = array_of(data, ACCEL_INT32, 4);
	CHECK_CODE(r, accel_reduce(r->world, &bad, ACCEL_MEAN), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_reduce(r->world, &good, 0), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_reduce(r->world, &good, ACCEL_MAX + 1), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_reduce(r->world, NULL, ACCEL_SUM), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_broadcast(r->world, &good, -1), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_broadcast(r->world, &good, r->size), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_gather(r->world, &good, NULL), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_gather_into(r->world, data), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_prepare(r->world, NULL, 0, 0, &model), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_prepare(r->world, &good, 0, 0, &model), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_barrier(NULL), ACCEL_E_INVALID);
	CHECK(r, !model);
	reduce_one(r, ACCEL_FLOAT32, ACCEL_SUM, 4, 1);
}

static void wrong_arguments_are_refused_before_anybody_is_waited_for(void **state)
{
	(void)state;
	run_all(ask_for_nonsense, NULL);
}

static void leave_a_gather_half_done(struct rank *r)
{
	float data[2] = { 0 };
	struct accel_array a = array_of(data, ACCEL_FLOAT32, 2);
	struct accel_model *model = NULL;
	uint64_t rows[MAX_RANKS];
	void *memory;

	CHECK_OK(r, accel_gather(r->world, &a, rows));
	CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_INVALID);
	CHECK(r, strstr(accel_error(), "accel_gather_into()"));
	CHECK_CODE(r, accel_gather(r->world, &a, rows), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_reduce(r->world, &a, ACCEL_SUM), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_join(r->world), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_alloc(r->world, 1, &memory), ACCEL_E_INVALID);
	CHECK_CODE(r, accel_prepare(r->world, &a, 1, 0, &model), ACCEL_E_INVALID);
	CHECK_OK(r, accel_gather_into(r->world, NULL));
	CHECK_OK(r, accel_barrier(r->world));
}

static void between_the_two_calls_of_gather_nothing_else_may_be_called(void **state)
{
	(void)state;
	run_all(leave_a_gather_half_done, NULL);
}

/* ---- one thread at a time --------------------------------------------------------- */

static void call_from_two_threads(struct rank *r)
{
	if (r->number) {
		uint64_t rows[MAX_RANKS];
		int64_t x = 0;
		struct accel_array a = { &x, ACCEL_INT64, 0, { 0 } };
		accel_world *theirs;

		until_waits(r, 0);
		theirs = r->all[0].world;
		CHECK_CODE(r, accel_barrier(theirs), ACCEL_E_BUSY);
		CHECK_CODE(r, accel_reduce(theirs, &a, ACCEL_SUM), ACCEL_E_BUSY);
		CHECK_CODE(r, accel_gather(theirs, &a, rows), ACCEL_E_BUSY);
		CHECK_CODE(r, accel_join(theirs), ACCEL_E_BUSY);
	}
	CHECK_OK(r, accel_barrier(r->world));
	CHECK_OK(r, accel_barrier(r->world));
}

static void a_second_thread_is_told_that_the_world_is_busy(void **state)
{
	(void)state;
	run(2, call_from_two_threads, NULL);
}

/* ---- ranks that do not come ------------------------------------------------------- */

static void check_lost(struct rank *r, const char *text)
{
	CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_LOST);
	CHECK(r, strstr(accel_error(), text));
	(void)snprintf(r->text, sizeof(r->text), "%s", accel_error());
	/* From then on everything. */
	CHECK_CODE(r, accel_should_stop(r->world), ACCEL_E_LOST);
	CHECK(r, strcmp(r->text, accel_error()) == 0);
	CHECK_CODE(r, accel_join(r->world), ACCEL_E_LOST);
}

static void the_last_one_fails(struct rank *r)
{
	if (r->number < r->size - 1) {
		check_lost(r, "ValueError: out of luck");
		return;
	}
	for (int k = 0; k < r->size - 1; k++)
		until_waits(r, k);
	accel_fail(r->world, "Traceback:\n  File \"x.py\"\nValueError: out of luck\n");
	check_lost(r, "failed");
}

static void what_a_rank_failed_of_reaches_those_that_wait(void **state)
{
	struct ring *ring = ring_of(3);
	struct rank ranks[MAX_RANKS];
	int failures = failures_over(ring, the_last_one_fails, NULL, ranks);

	(void)state;
	ring_free(ring);
	assert_int_equal(failures, 0);
	for (int k = 0; k < 3; k++)
		assert_string_equal(ranks[k].text, ranks[0].text);
	assert_non_null(strstr(ranks[0].text, "rank 2 failed"));
	assert_null(strstr(ranks[0].text, "Traceback"));
}

static void the_first_one_fails_early(struct rank *r)
{
	if (!r->number)
		accel_fail(r->world, "RuntimeError: early");
	CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_LOST);
	CHECK(r, strstr(accel_error(), "rank 0 failed"));
	CHECK(r, strstr(accel_error(), "RuntimeError: early"));
}

static void what_a_rank_failed_of_reaches_those_that_come_later(void **state)
{
	(void)state;
	run(3, the_first_one_fails_early, NULL);
}

static void the_last_one_finishes(struct rank *r)
{
	if (r->number < r->size - 1) {
		check_lost(r, "has finished");
		return;
	}
	for (int k = 0; k < r->size - 1; k++)
		until_waits(r, k);
	accel_finish(r->world);
	r->world = NULL;
}

static void a_rank_that_finishes_is_an_error_for_those_that_wait(void **state)
{
	(void)state;
	run(2, the_last_one_finishes, NULL);
	run(3, the_last_one_finishes, NULL);
}

static void fail_amid_a_gather(struct rank *r)
{
	const uint64_t count = 300001;
	float *data = calloc(count, sizeof(*data));
	struct accel_array a = array_of(data, ACCEL_FLOAT32, count);
	uint64_t rows[MAX_RANKS];

	CHECK_OK(r, accel_gather(r->world, &a, rows));
	if (r->number == 1) {
		until_waits(r, 0);
		accel_fail(r->world, "half way");
	}
	CHECK_CODE(r, accel_gather_into(r->world, NULL), ACCEL_E_LOST);
	CHECK(r, strstr(accel_error(), "half way"));
	CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_LOST);
	free(data);
}

static void a_failure_amid_a_gather_breaks_the_world(void **state)
{
	(void)state;
	run(2, fail_amid_a_gather, NULL);
	run(3, fail_amid_a_gather, NULL);
}

static void fail_amid_a_backward(struct rank *r)
{
	float data[3] = { 1, 2, 3 };
	struct accel_array a = array_of(data, ACCEL_FLOAT32, 3);
	struct accel_model *model = NULL;
	void *list[1] = { r->number ? NULL : data };

	CHECK_OK(r, accel_prepare(r->world, &a, 1, ACCEL_KEEP, &model));
	if (r->number) {
		CHECK_CODE(r, accel_backward(model, list), 1);
		until_waits(r, 0);
		accel_fail(r->world, "half way");
		list[0] = data;
	}
	CHECK_CODE(r, accel_backward(model, list), ACCEL_E_LOST);
	CHECK(r, strstr(accel_error(), "half way"));
	CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_LOST);
}

static void a_failure_amid_a_backward_breaks_the_world(void **state)
{
	(void)state;
	run(2, fail_amid_a_backward, NULL);
}

/* Rank 1 comes only after rank 0 has given up. */
static void come_too_late(struct rank *r)
{
	if (r->number) {
		while (!__atomic_load_n(&r->ring->page->abort_state, __ATOMIC_SEQ_CST))
			(void)sched_yield();
	}
	CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_TIMEOUT);
	CHECK(r, strstr(accel_error(), "barrier: waited 1 s (ACCEL_TIMEOUT)"));
	CHECK(r, strstr(accel_error(), "rank 1"));
	CHECK(r, !strstr(accel_error(), "rank 0"));
}

static void a_rank_that_does_not_come_in_time_is_named(void **state)
{
	(void)state;
	assert_int_equal(setenv("ACCEL_TIMEOUT", "1", 1), 0);
	run(2, come_too_late, NULL);
}

static void stay_away_amid_a_gather(struct rank *r)
{
	const uint64_t count = 300001;
	float *data = calloc(count, sizeof(*data));
	struct accel_array a = array_of(data, ACCEL_FLOAT32, count);
	uint64_t rows[MAX_RANKS];

	CHECK_OK(r, accel_gather(r->world, &a, rows));
	if (r->number == 1)
		while (!__atomic_load_n(&r->ring->page->abort_state, __ATOMIC_SEQ_CST))
			(void)sched_yield();
	CHECK_CODE(r, accel_gather_into(r->world, NULL), ACCEL_E_TIMEOUT);
	CHECK(r, strstr(accel_error(), "gather of float32 (300001,): waited 1 s"));
	CHECK(r, strstr(accel_error(), "rank 1"));
	free(data);
}

static void a_rank_that_stops_amid_a_call_is_named(void **state)
{
	(void)state;
	assert_int_equal(setenv("ACCEL_TIMEOUT", "1", 1), 0);
	run(2, stay_away_amid_a_gather, NULL);
}

static void give_up(struct rank *r)
{
	r->wait_result = r->number == 0;
	if (r->number) {
		until_waits(r, 0);
		return;
	}
	CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_INTERRUPTED);
	CHECK(r, strstr(accel_error(), "interrupted in barrier"));
	CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_INTERRUPTED);
}

static void the_callback_ends_a_wait(void **state)
{
	(void)state;
	run(2, give_up, NULL);
}

/* ---- one program after another ---------------------------------------------------- */

static void count_ranks(struct rank *r)
{
	reduce_one(r, ACCEL_INT32, ACCEL_SUM, 5, 1);
	reduce_one(r, ACCEL_FLOAT32, ACCEL_SUM, 100001, 2);
	gather_ragged(r, &ragged[7], true);
}

static void programs_follow_each_other_in_the_same_ranks(void **state)
{
	(void)state;
	run_in_a_row(3, count_ranks, 5);
}

/* Rank 0's program ends and the next one begins, while rank 1 still wants something of
 * the first. */
static void one_begins_the_next_program(struct rank *r)
{
	accel_world *next = NULL;

	if (r->number) {
		until_waits(r, 0);
		CHECK_CODE(r, accel_barrier(r->world), ACCEL_E_LOST);
		CHECK(r, strstr(accel_error(), "rank 0 has finished"));
		return;
	}
	accel_finish(r->world);
	r->world = NULL;
	CHECK_CODE(r, world_over_ring(&next, r->ring->page, r->ring->fd, 0),
		   ACCEL_E_LOST);
	accel_finish(next);
}

static void calls_of_one_program_are_not_answered_by_the_next(void **state)
{
	(void)state;
	run(2, one_begins_the_next_program, NULL);
}

/* ---- what is counted -------------------------------------------------------------- */

static void count_calls(struct rank *r)
{
	float data[100] = { 0 };
	struct accel_array a = array_of(data, ACCEL_FLOAT32, 100);
	struct accel_counters c;
	struct accel_model *model = NULL;
	uint64_t rows[MAX_RANKS];
	void *list[1] = { data };

	accel_counters(r->world, &c);
	CHECK(r, !c.barrier.calls && !c.reduce.calls && !c.steps);
	CHECK_OK(r, accel_barrier(r->world));
	CHECK_OK(r, accel_reduce(r->world, &a, ACCEL_SUM));
	CHECK_OK(r, accel_reduce(r->world, &a, ACCEL_SUM));
	CHECK_OK(r, accel_broadcast(r->world, &a, 0));
	CHECK_OK(r, accel_gather(r->world, &a, rows));
	CHECK_OK(r, accel_gather_into(r->world, NULL));
	CHECK_OK(r, accel_prepare(r->world, &a, 1, ACCEL_KEEP, &model));
	CHECK_OK(r, accel_backward(model, list));
	list[0] = NULL;
	CHECK_OK(r, accel_backward(model, list));
	for (int i = 0; i < 5; i++)
		accel_step(r->world);
	accel_counters(r->world, &c);
	CHECK(r, c.barrier.calls == 1 && c.barrier.bytes == 0);
	CHECK(r, c.reduce.calls == 2 && c.reduce.bytes == 800);
	CHECK(r, c.broadcast.calls == 1 && c.broadcast.bytes == 400);
	CHECK(r, c.gather.calls == 1 && c.gather.bytes == 400);
	CHECK(r, c.backward.calls == 2 && c.backward.bytes == 400);
	CHECK(r, c.steps == 5);
}

static void calls_and_bytes_are_counted(void **state)
{
	(void)state;
	run_all(count_calls, NULL);
}

/* ---- alone ------------------------------------------------------------------------ */

static void a_program_started_by_hand_is_a_world_of_one(void **state)
{
	struct rank r = { .size = 1, .all = &r };
	accel_world *again = NULL;
	float *memory = NULL;

	(void)state;
	CHECK_OK(&r, accel_init(&r.world));
	CHECK_OK(&r, accel_init(&again));
	assert_ptr_equal(again, r.world);
	assert_int_equal(accel_rank(r.world), 0);
	assert_int_equal(accel_size(r.world), 1);
	assert_int_equal(accel_local_rank(r.world), 0);
	assert_int_equal(accel_local_size(r.world), 1);
	assert_string_equal(accel_device(r.world), "cpu");
	assert_string_equal(accel_mixed_precision(r.world), "no");
	reduce_everything(&r);
	reduce_shapes(&r);
	broadcast_around_edges(&r);
	gather_all_ragged(&r);
	gather_scalars(&r);
	prepare_both_ways(&r);
	backward_all_patterns(&r);
	alloc_and_reduce(&r);
	alloc_wrongly(&r);
	ask_for_nonsense(&r);
	leave_a_gather_half_done(&r);
	CHECK_OK(&r, accel_alloc(r.world, 1 << 20, (void **)&memory));
	CHECK_CODE(&r, accel_should_stop(r.world), 0);
	CHECK_OK(&r, accel_join(r.world));
	accel_fail(r.world, "alone");
	accel_finish(r.world);
	accel_finish(NULL);
	if (r.n_failures)
		fail_msg("%s", r.failure);
	assert_int_equal(accel_abi(), ACCEL_ABI);
	assert_string_equal(accel_version(), ACCEL_VERSION);
}

/* ---- anything, in any order ------------------------------------------------------- */

/*
 * All ranks run the same script: what comes next is drawn from a generator that they
 * have in common. One that has joined draws along and calls nothing.
 */
struct script {
	struct rank *r;
	uint64_t common;
	unsigned active;
	accel_model *model;
	struct memory memory;
	uint8_t *arena;
	int n_allocated, step;
};

enum { ARENA = 200 * KIB };

static bool is_out(const struct script *s)
{
	return !(s->active >> s->r->number & 1);
}

static int n_active(const struct script *s)
{
	return __builtin_popcount(s->active);
}

/* Mostly few, now and then several slots full. */
static size_t draw_count(struct script *s, int dtype)
{
	unsigned bits = (unsigned)random_below(&s->common, is_small ? 17 : 21);

	return random_below(&s->common, (UINT64_C(1) << bits) + 1) / dtype_size(dtype);
}

static int draw_op(struct script *s, int dtype)
{
	int op = (int)random_below(&s->common, 4) + 1;

	return op == ACCEL_MEAN && !is_floating(dtype) ? ACCEL_SUM : op;
}

static void step_barrier(struct script *s)
{
	if (!is_out(s))
		CHECK_OK(s->r, accel_barrier(s->r->world));
}

static void step_stop(struct script *s)
{
	if (!is_out(s))
		CHECK_CODE(s->r, accel_should_stop(s->r->world), 0);
}

static void reduce_in(struct script *s, void *data, int dtype, size_t count, int op)
{
	struct accel_array a = array_of(data, dtype, count);
	uint64_t seed = (uint64_t)s->step * 1000;

	fill(dtype, data, count, seed, s->r->number);
	CHECK_OK(s->r, accel_reduce(s->r->world, &a, op));
	check_reduced(s->r, dtype, op, data, count, seed, s->active,
		      op == ACCEL_MEAN ? n_active(s) : 1);
}

static void step_reduce(struct script *s)
{
	int dtype = all_dtypes[random_below(&s->common, N_ALL_DTYPES)];
	size_t count = draw_count(s, dtype);
	int op = draw_op(s, dtype);
	void *data;

	if (is_out(s))
		return;
	data = fenced(dtype, count);
	reduce_in(s, data, dtype, count, op);
	free_fenced(s->r, data, dtype, count);
}

static void step_reduce_arena(struct script *s)
{
	int dtype = all_dtypes[random_below(&s->common, N_ALL_DTYPES)];
	size_t count = random_below(&s->common, ARENA / dtype_size(dtype));
	int op = draw_op(s, dtype);

	if (!is_out(s) && s->arena)
		reduce_in(s, s->arena, dtype, count, op);
}

/* Memory that all have is used from then on. */
static void step_alloc(struct script *s)
{
	int dtype = all_dtypes[random_below(&s->common, N_ALL_DTYPES)];
	uint8_t *memory = NULL;

	if (s->n_allocated++ >= 6 || is_out(s))
		return;
	CHECK_OK(s->r, accel_alloc(s->r->world, ARENA, (void **)&memory));
	for (size_t i = 0; memory && i < ARENA; i++)
		if (!CHECK(s->r, !memory[i]))
			return;
	if (memory)
		reduce_in(s, memory, dtype, ARENA / dtype_size(dtype), ACCEL_SUM);
	if (s->active == everybody(s->r))
		s->arena = memory;
}

static void step_broadcast(struct script *s)
{
	size_t bytes = draw_count(s, ACCEL_UINT8);
	int root = (int)random_below(&s->common, (uint64_t)s->r->size);
	bool can_be = s->active >> root & 1;
	uint64_t seed = (uint64_t)s->step * 1000;
	struct accel_array a;
	uint8_t *data;

	if (is_out(s))
		return;
	data = fenced(ACCEL_UINT8, bytes);
	a = array_of(data, ACCEL_UINT8, bytes);
	fill(ACCEL_UINT8, data, bytes, seed, s->r->number);
	CHECK_CODE(s->r, accel_broadcast(s->r->world, &a, root),
		   can_be ? 0 : ACCEL_E_MISMATCH);
	if (can_be)
		check_reduced(s->r, ACCEL_UINT8, ACCEL_SUM, data, bytes, seed, 1u << root,
			      1);
	free_fenced(s->r, data, ACCEL_UINT8, bytes);
}

static void step_gather(struct script *s)
{
	struct rows t = { "rows", random_below(&s->common, 6), { 0 } };
	bool wants_it = random_below(&s->r->random, 4) != 0;

	for (int k = 0; k < s->r->size; k++) {
		t.rows[k] = draw_count(s, ACCEL_FLOAT64);
		if (!(s->active >> k & 1))
			t.rows[k] = 0;
	}
	if (!is_out(s))
		gather_ragged(s->r, &t, wants_it);
}

static void step_backward(struct script *s)
{
	int pattern = (int)random_below(&s->common, 20);

	if (!is_out(s))
		backward_once(s->r, s->model, pattern, s->active,
			      (uint64_t)s->step * 1000);
}

static void step_disagree(struct script *s)
{
	int64_t one = 1;
	struct accel_array a = { &one, ACCEL_INT64, 0, { 0 } };
	int last = 31 - __builtin_clz(s->active);

	if (is_out(s) || n_active(s) < 2)
		return;
	CHECK_CODE(s->r,
		   s->r->number == last ? accel_barrier(s->r->world)
					: accel_reduce(s->r->world, &a, ACCEL_SUM),
		   ACCEL_E_MISMATCH);
	CHECK(s->r, one == 1);
}

static void step_prepare(struct script *s)
{
	int flags = random_below(&s->common, 2) ? ACCEL_KEEP : 0;

	if (s->active != everybody(s->r))
		return;
	accel_model_free(s->model);
	CHECK_OK(s->r, accel_prepare(s->r->world, s->memory.arrays, N_PARAMETERS, flags,
				     &s->model));
}

static void all_join(struct script *s)
{
	if (!is_out(s))
		CHECK_OK(s->r, accel_join(s->r->world));
	s->active = everybody(s->r);
}

/* Some have no more to do. */
static void step_join(struct script *s)
{
	unsigned stay = (unsigned)next_random(&s->common) & s->active;

	if (s->active != everybody(s->r) && random_below(&s->common, 2)) {
		all_join(s);
		return;
	}
	if (!stay)
		return;
	if (!is_out(s) && !(stay >> s->r->number & 1))
		CHECK_OK(s->r, accel_join(s->r->world));
	s->active = stay;
}

/* Ranks are never quite at the same place. */
static void dawdle(struct script *s)
{
	uint64_t x = random_below(&s->r->random, 64);
	struct timespec t = { 0, (long)random_below(&s->r->random, 300000) };

	if (x == 0)
		(void)nanosleep(&t, NULL);
	else if (x < 8)
		(void)sched_yield();
}

static void (*const steps[])(struct script *s) = {
	step_barrier,   step_stop,     step_reduce,   step_reduce,  step_reduce_arena,
	step_reduce,    step_gather,   step_gather,   step_join,    step_broadcast,
	step_broadcast, step_backward, step_disagree, step_prepare, step_alloc,
};

static void follow_the_script(struct rank *r)
{
	struct script s = { .r = r,
			    .common = *(const uint64_t *)r->data,
			    .active = everybody(r) };
	int n = is_small ? 80 : 250;

	memory_init(&s.memory, 7, 0);
	CHECK_OK(r, accel_alloc(r->world, ARENA, (void **)&s.arena));
	CHECK_OK(r, accel_prepare(r->world, s.memory.arrays, N_PARAMETERS, ACCEL_KEEP,
				  &s.model));
	for (s.step = 0; s.step < n && !r->n_failures; s.step++) {
		dawdle(&s);
		steps[random_below(&s.common, COUNT(steps))](&s);
	}
	all_join(&s);
	CHECK_OK(r, accel_barrier(r->world));
	memory_fini(r, &s.memory);
}

static void any_sequence_of_calls_gives_what_it_should(void **state)
{
	(void)state;
	for (size_t i = 0; i < COUNT(world_sizes); i++) {
		uint64_t seed = first_seed + i;

		printf("# %d ranks with --seed %llu\n", world_sizes[i],
		       (unsigned long long)seed);
		run(world_sizes[i], follow_the_script, &seed);
	}
}

/* As if 2^32 slots had been used before. */
static void the_count_of_slots_goes_beyond_32_bits(void **state)
{
	struct ring *ring = ring_of(3);
	struct accel_world view = { .ring = ring->page };
	int failures;

	(void)state;
	for (int k = 0; k < 3; k++)
		cell_of(&view, k)->consumed = UINT32_MAX - 10;
	failures = failures_over(ring, follow_the_script, &first_seed, NULL);
	for (int k = 0; k < 3; k++)
		failures += cell_of(&view, k)->consumed <= UINT32_MAX;
	ring_free(ring);
	assert_int_equal(failures, 0);
}

/* ----------------------------------------------------------------------------------- */

static int before_each(void **state)
{
	(void)state;
	/* What hangs becomes an error. */
	return setenv("ACCEL_TIMEOUT", "60", 1);
}

#define TEST(name) cmocka_unit_test_setup(name, before_each)

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		TEST(a_reduction_of_any_size_is_that_of_its_elements),
		TEST(a_reduction_works_for_every_dtype_and_operation),
		TEST(an_array_of_any_shape_is_reduced),
		TEST(a_broadcast_of_any_size_gives_all_what_its_root_has),
		TEST(gathered_rows_lie_in_the_order_of_ranks),
		TEST(a_rank_may_decline_what_was_gathered),
		TEST(a_scalar_is_gathered_as_one_row),
		TEST(a_model_begins_with_the_parameters_of_rank_0_unless_kept),
		TEST(gradients_are_averaged_whoever_has_them),
		TEST(a_model_may_have_thousands_of_parameters),
		TEST(between_the_two_calls_of_backward_nothing_else_may_be_called),
		TEST(a_world_has_several_models),
		TEST(the_loss_scale_halves_at_an_overflow_and_grows_after_2000_steps),
		TEST(memory_of_the_arenas_is_zeroed_aligned_and_reduced_in_place),
		TEST(gradients_may_lie_in_several_regions_of_the_arenas),
		TEST(an_arena_too_large_for_memory_is_refused_on_all_ranks),
		TEST(memory_is_zeroed_for_the_next_program_too),
		TEST(a_rank_that_has_joined_adds_nothing_and_counts_as_zero_for_gradients),
		TEST(a_broadcast_from_a_rank_that_has_joined_fails_on_the_others),
		TEST(a_model_is_prepared_beside_a_joined_rank_0_only_if_kept),
		TEST(ranks_that_disagree_do_not_disturb_one_that_has_joined),
		TEST(memory_is_allocated_while_a_rank_has_joined_and_after),
		TEST(a_rank_that_has_joined_waits_as_long_as_the_others_go_on),
		TEST(ranks_that_want_different_things_are_told_the_same_and_go_on),
		TEST(gradients_in_the_arenas_of_some_ranks_are_averaged_as_well),
		TEST(data_in_the_arenas_of_some_ranks_goes_through_the_slots),
		TEST(wrong_arguments_are_refused_before_anybody_is_waited_for),
		TEST(between_the_two_calls_of_gather_nothing_else_may_be_called),
		TEST(a_second_thread_is_told_that_the_world_is_busy),
		TEST(what_a_rank_failed_of_reaches_those_that_wait),
		TEST(what_a_rank_failed_of_reaches_those_that_come_later),
		TEST(a_rank_that_finishes_is_an_error_for_those_that_wait),
		TEST(a_failure_amid_a_gather_breaks_the_world),
		TEST(a_failure_amid_a_backward_breaks_the_world),
		TEST(a_rank_that_does_not_come_in_time_is_named),
		TEST(a_rank_that_stops_amid_a_call_is_named),
		TEST(the_callback_ends_a_wait),
		TEST(programs_follow_each_other_in_the_same_ranks),
		TEST(calls_of_one_program_are_not_answered_by_the_next),
		TEST(calls_and_bytes_are_counted),
		TEST(a_program_started_by_hand_is_a_world_of_one),
		TEST(any_sequence_of_calls_gives_what_it_should),
		TEST(the_count_of_slots_goes_beyond_32_bits),
	};

	first_seed = now_us();
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--small") == 0)
			is_small = true;
		else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
			first_seed = strtoull(argv[++i], NULL, 10);
		else
			cmocka_set_test_filter(argv[i]);
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}
