/*
 * A model's parameters, and their gradients: given to all ranks, averaged, and
 * checked after 16-bit training.
 *
 * Averaging is two steps. Ranks first tell which parameters have a gradient; then
 * what any rank has is averaged, one pass for each dtype, in the order of
 * parameters.
 */

#include <stdlib.h>
#include <string.h>

#include "runtime/world.h"

enum { GROWTH_STEPS = 2000 };

static const double FIRST_SCALE = 65536, MIN_SCALE = 1, MAX_SCALE = 0x1p40;

struct accel_model {
	accel_world *world;
	struct accel_model *next;
	size_t n;
	struct accel_array *parameters;
	uint64_t *bytes; /* of each */
	uint64_t elements, fingerprint;
	struct piece *pieces;
	uint64_t *touched; /* one bit for each: somebody has a gradient */
	uint64_t *missing; /* numbers of parameters */
	size_t n_missing;
	double scale;
	int good_steps;
};

static int describe_parameters(accel_model *m)
{
	m->fingerprint = HASH_START;
	for (size_t i = 0; i < m->n; i++) {
		const struct accel_array *a = &m->parameters[i];
		uint64_t count = 1;

		if (!dtype_size(a->dtype) || a->n_dims < 0 || a->n_dims > ACCEL_MAX_DIMS)
			return fail(
				ACCEL_E_INVALID,
				"prepare: parameter %zu has dtype %d and %d dimensions",
				i, a->dtype, a->n_dims);
		m->fingerprint =
			hash_number(hash_number(m->fingerprint, (uint64_t)a->dtype),
				    (uint64_t)a->n_dims);
		for (int d = 0; d < a->n_dims; d++) {
			if (__builtin_mul_overflow(count, a->dims[d], &count) ||
			    count > UINT64_MAX / 16)
				return fail(ACCEL_E_INVALID,
					    "prepare: the dimensions of parameter %zu "
					    "overflow",
					    i);
			m->fingerprint = hash_number(m->fingerprint, a->dims[d]);
		}
		m->bytes[i] = count * dtype_size(a->dtype);
		m->elements += count;
	}
	return 0;
}

static size_t n_words(size_t n)
{
	return (n + 63) / 64;
}

static accel_model *model_free(accel_model *m)
{
	if (!m)
		return NULL;
	free(m->parameters);
	free(m->bytes);
	free(m->pieces);
	free(m->touched);
	free(m->missing);
	free(m);
	return NULL;
}

static accel_model *model_new(accel_world *w, const struct accel_array *parameters,
			      size_t n)
{
	accel_model *m = calloc(1, sizeof(*m));

	if (!m)
		return NULL;
	m->world = w;
	m->n = n;
	m->scale = FIRST_SCALE;
	m->parameters = calloc(n, sizeof(*m->parameters));
	m->bytes = calloc(n, sizeof(*m->bytes));
	m->pieces = calloc(n, sizeof(*m->pieces));
	m->touched = calloc(n_words(n), sizeof(*m->touched));
	m->missing = calloc(n, sizeof(*m->missing));
	if (!m->parameters || !m->bytes || !m->pieces || !m->touched || !m->missing)
		return model_free(m);
	memcpy(m->parameters, parameters, n * sizeof(*parameters));
	return m;
}

/* The parameters' memory, all of it. */
static int share(accel_model *m, int flags)
{
	accel_world *w = m->world;
	uint64_t bytes = 0;

	for (size_t i = 0; i < m->n; i++) {
		m->pieces[i] = (struct piece){ m->parameters[i].data, m->bytes[i] };
		if (!(flags & ACCEL_KEEP) && m->bytes[i] && !m->parameters[i].data)
			return fail(ACCEL_E_INVALID, "prepare: parameter %zu has no data",
				    i);
		bytes += m->bytes[i];
	}
	if (flags & ACCEL_KEEP)
		bytes = 0;
	w->counters.broadcast.calls += flags & ACCEL_KEEP ? 0 : 1;
	w->counters.broadcast.bytes += bytes;
	if (w->size == 1)
		return 0;
	w->head = (struct head){ .kind = KIND_PREPARE,
				 .flags = flags & ACCEL_KEEP ? HEAD_KEEP : 0,
				 .bytes = bytes,
				 .tag = m->fingerprint,
				 .n_dims = 2,
				 .dims = { m->n, m->elements } };
	return flow_broadcast(w, m->pieces);
}

static int prepare(accel_world *w, const struct accel_array *parameters, size_t n,
		   int flags, accel_model **ret)
{
	accel_model *m;
	int r;

	if (!n || !parameters)
		return fail(ACCEL_E_INVALID, "prepare: a model without parameters");
	if (w->ring && n > (size_t)w->ring->slot_bytes * 8)
		return fail(ACCEL_E_INVALID,
			    "prepare: %zu parameters, where at most %zu can "
			    "be with so many ranks",
			    n, (size_t)w->ring->slot_bytes * 8);
	m = model_new(w, parameters, n);
	if (!m)
		return fail(ACCEL_E_MEMORY, "prepare: no memory for %zu parameters", n);
	r = describe_parameters(m);
	if (!r)
		r = share(m, flags);
	if (r < 0) {
		(void)model_free(m);
		return r;
	}
	m->next = w->models;
	w->models = m;
	*ret = m;
	return 0;
}

int accel_prepare(accel_world *w, const struct accel_array *parameters, size_t n,
		  int flags, accel_model **ret)
{
	int r = enter(w, NOTHING_PENDING);

	return r < 0 ? r : leave(w, prepare(w, parameters, n, flags, ret));
}

void accel_model_free(accel_model *m)
{
	accel_model **at;

	if (!m)
		return;
	if (m->world->pending_model == m) {
		m->world->pending = NOTHING_PENDING;
		m->world->pending_model = NULL;
	}
	at = &m->world->models;
	while (*at && *at != m)
		at = &(*at)->next;
	if (*at)
		*at = m->next;
	(void)model_free(m);
}

void models_free(accel_world *w)
{
	while (w->models)
		accel_model_free(w->models);
}

/* ---- which gradients there are -------------------------------------------------------
 */

static void note_own(accel_model *m, void *const *gradients)
{
	memset(m->touched, 0, n_words(m->n) * sizeof(*m->touched));
	for (size_t i = 0; i < m->n; i++)
		if (gradients[i])
			m->touched[i / 64] |= UINT64_C(1) << (i % 64);
}

/* After this, m->touched is what any rank has. */
static int exchange_touched(accel_model *m)
{
	accel_world *w = m->world;
	size_t n = n_words(m->n);
	struct slot *slot;
	int r;

	w->head = (struct head){ .kind = KIND_TOUCHED,
				 .bytes = n * sizeof(*m->touched),
				 .tag = m->fingerprint,
				 .n_dims = 2,
				 .dims = { m->n, m->elements } };
	r = call_begin(w, &slot);
	if (r < 0)
		return r;
	memcpy(data_of(slot), m->touched, n * sizeof(*m->touched));
	r = call_meet(w);
	if (r < 0)
		return r;
	for (int p = 0; p < w->n_active; p++) {
		const uint64_t *theirs =
			(const uint64_t *)data_of(slot_of(w, w->active[p], w->next));

		for (size_t i = 0; w->active[p] != w->local_rank && i < n; i++)
			m->touched[i] |= theirs[i];
	}
	call_end(w, 1);
	return 0;
}

static bool is_touched(const accel_model *m, size_t i)
{
	return m->touched[i / 64] >> (i % 64) & 1;
}

static int list_missing(accel_model *m, void *const *gradients)
{
	m->n_missing = 0;
	for (size_t i = 0; i < m->n; i++)
		if (is_touched(m, i) && !gradients[i])
			m->missing[m->n_missing++] = i;
	return (int)m->n_missing;
}

const uint64_t *accel_missing(const accel_model *m)
{
	return m->missing;
}

/* ---- averaging
 * --------------------------------------------------------------------------- */

/* One pass over the gradients of a dtype. */
static int average_dtype(accel_model *m, void *const *gradients, int dtype)
{
	accel_world *w = m->world;
	uint64_t bytes = 0;
	size_t n = 0;

	for (size_t i = 0; i < m->n; i++) {
		if (m->parameters[i].dtype != dtype || !is_touched(m, i) || !m->bytes[i])
			continue;
		m->pieces[n++] = (struct piece){ gradients[i], m->bytes[i] };
		bytes += m->bytes[i];
	}
	if (!n)
		return 0;
	w->counters.backward.bytes += bytes;
	if (w->size == 1)
		return 0;
	w->head = (struct head){ .kind = KIND_BACKWARD,
				 .dtype = (uint8_t)dtype,
				 .bytes = bytes,
				 .n_dims = 1,
				 .dims = { bytes / dtype_size(dtype) } };
	/* A rank that has joined counts as zero, so the divisor is the whole world. */
	return flow_reduce(w, m->pieces, n, dtype, ACCEL_SUM, 1.0 / w->size);
}

static int average(accel_model *m, void *const *gradients)
{
	int r = 0;

	for (int dtype = ACCEL_FLOAT32; dtype <= ACCEL_BFLOAT16 && !r; dtype++)
		r = average_dtype(m, gradients, dtype);
	m->world->pending = NOTHING_PENDING;
	m->world->pending_model = NULL;
	return r;
}

static int backward(accel_model *m, void *const *gradients)
{
	accel_world *w = m->world;
	bool is_second = w->pending == BACKWARD_PENDING;
	int r = 0;

	if (!gradients)
		return fail(ACCEL_E_INVALID, "backward: gradients is NULL");
	if (is_second && w->pending_model != m)
		return fail(ACCEL_E_INVALID,
			    "backward: another model still misses gradients");
	if (!is_second) {
		note_own(m, gradients);
		w->counters.backward.calls++;
		if (w->size > 1)
			r = exchange_touched(m);
		if (r < 0)
			return r;
	}
	r = list_missing(m, gradients);
	if (r && is_second)
		return fail(ACCEL_E_INVALID,
			    "backward: %d gradients of accel_missing(), the "
			    "first of parameter %llu, are still NULL",
			    r, (unsigned long long)m->missing[0]);
	if (r) {
		w->pending = BACKWARD_PENDING;
		w->pending_model = m;
		return r;
	}
	return average(m, gradients);
}

int accel_backward(accel_model *m, void *const *gradients)
{
	int r = m ? enter(m->world, BACKWARD_PENDING)
		  : fail(ACCEL_E_INVALID, "no model: accel_prepare() comes first");

	return r < 0 ? r : leave(m->world, backward(m, gradients));
}

/* ---- the loss scale
 * ------------------------------------------------------------------------ */

double accel_loss_scale(const accel_model *m)
{
	return m->scale;
}

int accel_unscale(accel_model *m, void *const *gradients)
{
	bool is_odd = false;

	if (!m || !gradients)
		return fail(ACCEL_E_INVALID, "unscale: no model or no gradients");
	for (size_t i = 0; i < m->n; i++) {
		const struct accel_array *a = &m->parameters[i];

		if (gradients[i] && is_floating(a->dtype))
			is_odd |= scale_and_check(a->dtype, gradients[i],
						  m->bytes[i] / dtype_size(a->dtype),
						  1 / m->scale);
	}
	if (is_odd) {
		m->scale = m->scale / 2 > MIN_SCALE ? m->scale / 2 : MIN_SCALE;
		m->good_steps = 0;
	} else if (++m->good_steps == GROWTH_STEPS) {
		m->scale = m->scale * 2 < MAX_SCALE ? m->scale * 2 : MAX_SCALE;
		m->good_steps = 0;
	}
	return is_odd;
}
