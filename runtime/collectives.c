/* barrier, reduce, broadcast, gather, join. */

#include <stdlib.h>
#include <string.h>

#include "runtime/world.h"

static int check_array(const struct accel_array *a, const char *call)
{
	uint64_t n = 1;

	if (!a || !dtype_size(a->dtype))
		return fail(ACCEL_E_INVALID, "%s: dtype %d is none of enum accel_dtype",
			    call, a ? a->dtype : 0);
	if (a->n_dims < 0 || a->n_dims > ACCEL_MAX_DIMS)
		return fail(ACCEL_E_INVALID, "%s: %d dimensions, where 0 to %d can be",
			    call, a->n_dims, ACCEL_MAX_DIMS);
	for (int i = 0; i < a->n_dims; i++)
		if (__builtin_mul_overflow(n, a->dims[i], &n) || n > UINT64_MAX / 16)
			return fail(ACCEL_E_INVALID, "%s: the dimensions overflow", call);
	if (n && !a->data)
		return fail(ACCEL_E_INVALID, "%s: no data", call);
	return 0;
}

static uint64_t elements_of(const struct accel_array *a)
{
	uint64_t n = 1;

	for (int i = 0; i < a->n_dims; i++)
		n *= a->dims[i];
	return n;
}

static uint64_t bytes_of(const struct accel_array *a)
{
	return elements_of(a) * dtype_size(a->dtype);
}

static struct head head_for(enum kind kind, const struct accel_array *a)
{
	struct head head = { .kind = (uint8_t)kind,
			     .dtype = (uint8_t)a->dtype,
			     .n_dims = a->n_dims,
			     .bytes = bytes_of(a) };

	for (int i = 0; i < a->n_dims; i++)
		head.dims[i] = a->dims[i];
	return head;
}

static void count(struct accel_count *c, uint64_t bytes)
{
	c->calls++;
	c->bytes += bytes;
}

/* ---- without data -------------------------------------------------------------------
 */

static int meet_as(accel_world *w, enum kind kind)
{
	struct slot *slot;
	int r;

	w->head = (struct head){ .kind = (uint8_t)kind };
	r = call_begin(w, &slot);
	return r < 0 ? r : call_meet(w);
}

int accel_barrier(accel_world *w)
{
	int r = enter(w, NOTHING_PENDING);

	if (r < 0)
		return r;
	count(&w->counters.barrier, 0);
	if (w->size > 1) {
		r = meet_as(w, KIND_BARRIER);
		if (!r)
			call_end(w, 1);
	}
	return leave(w, r);
}

static int stop_wanted(accel_world *w)
{
	const struct control_page *page = w->page;
	int wanted = page && __atomic_load_n(&page->stop, __ATOMIC_RELAXED) != 0;
	struct slot *slot;
	int r;

	if (w->size == 1)
		return wanted;
	w->head = (struct head){ .kind = KIND_STOP, .value = (uint32_t)wanted };
	r = call_begin(w, &slot);
	if (!r)
		r = call_meet(w);
	if (r < 0)
		return r;
	for (int i = 0; i < w->n_active; i++)
		wanted |= slot_of(w, w->active[i], w->next)->head.value != 0;
	call_end(w, 1);
	return wanted;
}

int accel_should_stop(accel_world *w)
{
	int r = enter(w, NOTHING_PENDING);

	return r < 0 ? r : leave(w, stop_wanted(w));
}

/* Answer a call of the others without adding anything to it. */
static int join(accel_world *w)
{
	int r;

	do {
		const struct head *head;
		struct slot *slot;

		w->deadline_ms = 0; /* each of their calls has its own time */
		w->head = (struct head){ .kind = KIND_JOIN };
		r = call_begin(w, &slot);
		if (!r)
			r = call_meet(w);
		if (r == ACCEL_E_MISMATCH) {
			r = 0; /* theirs; the call is over */
			continue;
		}
		if (r < 0)
			return r;
		if (!w->n_active) {
			call_end(w, 1);
			return 0;
		}
		head = &slot_of(w, w->active[0], w->next)->head;
		if (head->kind == KIND_ALLOC)
			arena_follow(w, w->next);
		call_end(w, slots_of_call(w, head, w->next));
	} while (!r);
	return r;
}

int accel_join(accel_world *w)
{
	int r = enter(w, NOTHING_PENDING);

	return r < 0 ? r : leave(w, w->size > 1 ? join(w) : 0);
}

/* ---- reduce and broadcast -----------------------------------------------------------
 */

static int check_op(const struct accel_array *a, int op)
{
	if (op < ACCEL_SUM || op > ACCEL_MAX)
		return fail(ACCEL_E_INVALID, "reduce: %d is none of enum accel_op", op);
	if (op == ACCEL_MEAN && !is_floating(a->dtype))
		return fail(ACCEL_E_INVALID,
			    "reduce: the mean of %s is no %s; take the sum and divide it",
			    dtype_name(a->dtype), dtype_name(a->dtype));
	return 0;
}

static int reduce(accel_world *w, const struct accel_array *a, int op)
{
	struct piece piece;
	int r = check_array(a, "reduce");

	if (!r)
		r = check_op(a, op);
	if (r < 0)
		return r;
	piece = (struct piece){ a->data, bytes_of(a) };
	count(&w->counters.reduce, piece.bytes);
	if (w->size == 1)
		return 0;
	w->head = head_for(KIND_REDUCE, a);
	w->head.op = (uint8_t)op;
	return flow_reduce(w, &piece, 1, a->dtype, op, op == ACCEL_MEAN ? 0 : 1);
}

int accel_reduce(accel_world *w, const struct accel_array *array, int op)
{
	int r = enter(w, NOTHING_PENDING);

	return r < 0 ? r : leave(w, reduce(w, array, op));
}

static int broadcast(accel_world *w, const struct accel_array *a, int root)
{
	struct piece piece;
	int r = check_array(a, "broadcast");

	if (r < 0)
		return r;
	if (root < 0 || root >= w->size)
		return fail(ACCEL_E_INVALID,
			    "broadcast from rank %d, where there are 0 to %d", root,
			    w->size - 1);
	piece = (struct piece){ a->data, bytes_of(a) };
	count(&w->counters.broadcast, piece.bytes);
	if (w->size == 1)
		return 0;
	w->head = head_for(KIND_BROADCAST, a);
	w->head.root = root;
	return flow_broadcast(w, &piece);
}

int accel_broadcast(accel_world *w, const struct accel_array *array, int root)
{
	int r = enter(w, NOTHING_PENDING);

	return r < 0 ? r : leave(w, broadcast(w, array, root));
}

/* ---- gather
 * ---------------------------------------------------------------------------- */

static uint64_t rows_of(const struct head *head)
{
	return head->dims[0];
}

static size_t part_of(const accel_world *w, uint64_t bytes, uint32_t i)
{
	uint64_t from = (uint64_t)i * w->ring->slot_bytes;

	if (from >= bytes)
		return 0;
	return bytes - from < w->ring->slot_bytes ? (size_t)(bytes - from)
						  : w->ring->slot_bytes;
}

static int gather(accel_world *w, const struct accel_array *a, uint64_t *rows)
{
	struct slot *slot;
	int r = check_array(a, "gather");

	if (r < 0)
		return r;
	if (!rows)
		return fail(ACCEL_E_INVALID, "gather: rows is NULL");
	w->gather = *a;
	w->head = head_for(KIND_GATHER, a);
	if (!a->n_dims) {
		/* One row, which goes with arrays of rows. */
		w->head.n_dims = 1;
		w->head.dims[0] = 1;
	}
	count(&w->counters.gather, w->head.bytes);
	rows[0] = rows_of(&w->head);
	if (w->size > 1) {
		r = call_begin(w, &slot);
		if (r < 0)
			return r;
		if (w->head.bytes)
			memcpy(data_of(slot), a->data, part_of(w, w->head.bytes, 0));
		r = call_meet(w);
		if (r < 0)
			return r;
		memset(rows, 0, (size_t)w->size * sizeof(*rows));
		for (int i = 0; i < w->n_active; i++)
			rows[cell_of(w, w->active[i])->rank] =
				rows_of(&slot_of(w, w->active[i], w->next)->head);
	}
	w->pending = GATHER_PENDING;
	return 0;
}

int accel_gather(accel_world *w, const struct accel_array *array, uint64_t *rows)
{
	int r = enter(w, NOTHING_PENDING);

	return r < 0 ? r : leave(w, gather(w, array, rows));
}

static int send_part(accel_world *w, uint64_t base, uint32_t i)
{
	struct slot *slot = slot_of(w, w->local_rank, base + i);
	size_t bytes = part_of(w, w->head.bytes, i);
	int r;

	if (!bytes)
		return 0; /* nobody waits for it */
	r = call_await_free(w, base + i);
	if (r < 0)
		return r;
	memcpy(data_of(slot),
	       (const uint8_t *)w->gather.data + (uint64_t)i * w->ring->slot_bytes,
	       bytes);
	announce(w, &slot->seq, base + i + 1);
	return 0;
}

/* Part @i of everybody's array, to its place in @out. */
static int take_parts(accel_world *w, uint8_t *out, const uint64_t *sizes, uint64_t base,
		      uint32_t i)
{
	for (int p = 0; p < w->n_active; p++) {
		int rank = w->active[p], r;
		size_t bytes = part_of(w, sizes[p], i);

		if (bytes && rank != w->local_rank) {
			r = call_await_slot(w, rank, base + i);
			if (r < 0)
				return r;
			if (out)
				memcpy(out + (uint64_t)i * w->ring->slot_bytes,
				       data_of(slot_of(w, rank, base + i)), bytes);
		}
		if (out)
			out += sizes[p];
	}
	return 0;
}

static int gather_from_all(accel_world *w, uint8_t *out)
{
	uint64_t sizes[MAX_LOCAL_RANKS], before = 0;
	uint64_t base = w->next;
	uint32_t n = slots_of_call(w, &w->head, base);
	int r;

	for (int p = 0; p < w->n_active; p++) {
		sizes[p] = slot_of(w, w->active[p], base)->head.bytes;
		before += w->active[p] < w->local_rank ? sizes[p] : 0;
	}
	if (out && w->head.bytes)
		memcpy(out + before, w->gather.data, w->head.bytes);
	for (uint32_t i = 0; i < n; i++) {
		r = i + 1 < n ? send_part(w, base, i + 1) : 0;
		if (!r)
			r = take_parts(w, out, sizes, base, i);
		if (r < 0)
			return r;
		if (i + 1 < n)
			call_consumed(w, base + i + 1);
	}
	call_end(w, n);
	return 0;
}

static int gather_into(accel_world *w, void *out)
{
	if (w->pending != GATHER_PENDING)
		return fail(ACCEL_E_INVALID,
			    "accel_gather_into() without accel_gather()");
	w->pending = NOTHING_PENDING;
	if (w->size > 1)
		return gather_from_all(w, out);
	if (out && w->gather.data)
		memcpy(out, w->gather.data, bytes_of(&w->gather));
	return 0;
}

int accel_gather_into(accel_world *w, void *out)
{
	int r = enter(w, GATHER_PENDING);

	return r < 0 ? r : leave(w, gather_into(w, out));
}
