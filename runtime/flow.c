/*
 * Data that passes through the slots, in chunks, so that the ring stays in the
 * processor's caches while the data may be of any size.
 *
 * Two ranks: each writes its chunk into its slot and adds the other's slot to its
 * own memory. More ranks: a chunk is cut into one slice for each, a rank reduces
 * its slice of all slots into its own slot, and everybody copies the results.
 * Small arrays are reduced whole by every rank. Sums are always taken in the order
 * of ranks, so all ranks hold the same bits.
 */

#include <string.h>

#include "runtime/world.h"

enum {
	SMALL = 8 * 1024,      /* bytes that every rank reduces for itself */
	MIN_CHUNK = 16 * 1024, /* below, the exchange costs more than the copy */
	CHUNKS = 8, /* a pipeline has at least so many, if they are not too small */
	AHEAD = 2,  /* chunks written before they are needed */
};

/* ---- memory in pieces ------------------------------------------------------------ */

struct cursor {
	const struct piece *piece;
	size_t at; /* within it */
};

/* The next stretch of at most @max bytes; moves on. */
static size_t take_stretch(struct cursor *c, size_t max, uint8_t **ret)
{
	size_t n;

	while (c->at == c->piece->bytes) {
		c->piece++;
		c->at = 0;
	}
	n = c->piece->bytes - c->at;
	n = n < max ? n : max;
	*ret = (uint8_t *)c->piece->data + c->at;
	c->at += n;
	return n;
}

static void skip(struct cursor *c, size_t bytes)
{
	uint8_t *data;

	while (bytes)
		bytes -= take_stretch(c, bytes, &data);
}

static void copy_in(struct cursor *c, uint8_t *to, size_t bytes)
{
	uint8_t *data;

	while (bytes) {
		size_t n = take_stretch(c, bytes, &data);

		memcpy(to, data, n);
		to += n;
		bytes -= n;
	}
}

static void copy_out(struct cursor *c, const uint8_t *from, size_t bytes)
{
	uint8_t *data;

	while (bytes) {
		size_t n = take_stretch(c, bytes, &data);

		memcpy(data, from, n);
		from += n;
		bytes -= n;
	}
}

/* ---- how a call is cut ------------------------------------------------------------ */

static size_t round_up(size_t n, size_t to)
{
	return (n + to - 1) / to * to;
}

/* Everybody computes the same: it depends on what was compared, and on the ring. */
static size_t chunk_of(const accel_world *w, uint64_t bytes)
{
	size_t max = w->ring->chunk_bytes, chunk;

	if (bytes <= MIN_CHUNK)
		return MIN_CHUNK < max ? MIN_CHUNK : max;
	chunk = round_up(bytes / CHUNKS, 4096);
	if (chunk < MIN_CHUNK)
		chunk = MIN_CHUNK;
	return chunk < max ? chunk : max;
}

static uint32_t chunks_of(uint64_t bytes, size_t chunk)
{
	return bytes ? (uint32_t)((bytes + chunk - 1) / chunk) : 1;
}

static uint32_t slots_of_gather(const accel_world *w, uint64_t number)
{
	uint32_t most = 1;

	for (int i = 0; i < w->n_active; i++) {
		const struct slot *slot = slot_of(w, w->active[i], number);
		uint32_t n = chunks_of(slot->head.bytes, w->ring->slot_bytes);

		most = n > most ? n : most;
	}
	return most;
}

/* All ranks' data lies at the same place of the arenas, or of none, or of some. */
enum places { IN_ARENAS, IN_NONE, IN_SOME };

static enum places places_of(const accel_world *w, uint64_t number)
{
	const struct head *first = &slot_of(w, w->active[0], number)->head;
	int n = 0;

	for (int p = 0; p < w->n_active; p++) {
		const struct head *head = &slot_of(w, w->active[p], number)->head;

		n += head->flags & HEAD_ARENA ? 1 : 0;
		if ((head->flags & HEAD_ARENA) && head->tag != first->tag)
			return IN_SOME;
	}
	return !n ? IN_NONE : n == w->n_active ? IN_ARENAS : IN_SOME;
}

/* Where some have not sent data with their heads, all send it again behind them. */
static uint32_t slots_of_reduce(const accel_world *w, const struct head *head,
				uint64_t number)
{
	enum places places = places_of(w, number);
	uint32_t n = chunks_of(head->bytes, chunk_of(w, head->bytes));

	return places == IN_ARENAS ? 1 : places == IN_NONE ? n : n + 1;
}

uint32_t slots_of_call(const accel_world *w, const struct head *head, uint64_t number)
{
	switch (head->kind) {
	case KIND_REDUCE:
	case KIND_BACKWARD:
		return slots_of_reduce(w, head, number);
	case KIND_PREPARE:
		if (head->flags & HEAD_KEEP)
			return 1;
		return chunks_of(head->bytes, chunk_of(w, head->bytes));
	case KIND_BROADCAST:
		return chunks_of(head->bytes, chunk_of(w, head->bytes));
	case KIND_GATHER:
		return slots_of_gather(w, number);
	default:
		return 1;
	}
}

/* ---- reduce ------------------------------------------------------------------------ */

struct flow {
	accel_world *w;
	uint64_t base;
	uint32_t n_chunks;
	size_t chunk, slice, element;
	uint64_t bytes;
	int dtype, op;
	double factor;
	int place; /* of this rank among the active ones */
};

static size_t bytes_of_chunk(const struct flow *f, uint32_t i)
{
	uint64_t from = (uint64_t)i * f->chunk;

	return f->bytes - from < f->chunk ? (size_t)(f->bytes - from) : f->chunk;
}

static int place_of(const accel_world *w)
{
	for (int i = 0; i < w->n_active; i++)
		if (w->active[i] == w->local_rank)
			return i;
	return 0;
}

static uint8_t *slot_data(const struct flow *f, int place, uint32_t i)
{
	return data_of(slot_of(f->w, f->w->active[place], f->base + i));
}

static int await_chunk(struct flow *f, uint32_t i)
{
	for (int p = 0; p < f->w->n_active; p++) {
		int r = p == f->place
				? 0
				: call_await_slot(f->w, f->w->active[p], f->base + i);

		if (r < 0)
			return r;
	}
	return 0;
}

/* Write chunk @i into the own slot; the first was written before the ranks met. */
static int send_chunk(struct flow *f, struct cursor *in, uint32_t i)
{
	struct slot *slot = slot_of(f->w, f->w->local_rank, f->base + i);
	int r = call_await_free(f->w, f->base + i);

	if (r < 0)
		return r;
	copy_in(in, data_of(slot), bytes_of_chunk(f, i));
	announce(f->w, &slot->seq, f->base + i + 1);
	return 0;
}

/* Add everybody's chunk to the own memory. */
static void reduce_whole(struct flow *f, struct cursor *out, uint32_t i)
{
	const void *sources[MAX_LOCAL_RANKS];
	size_t at = 0, bytes = bytes_of_chunk(f, i);
	int n = f->w->n_active;
	uint8_t *own;

	while (at < bytes) {
		size_t len = take_stretch(out, bytes - at, &own);
		void *to = own;

		for (int p = 0; p < n; p++)
			sources[p] = p == f->place ? own : slot_data(f, p, i) + at;
		combine(f->dtype, f->op, &to, 1, sources, n, len / f->element, f->factor);
		at += len;
	}
}

static int reduce_by_chunks(struct flow *f, const struct piece *pieces)
{
	struct cursor in = { pieces, 0 }, out = { pieces, 0 };
	uint32_t sent = 1;
	int r;

	skip(&in, bytes_of_chunk(f, 0));
	for (uint32_t i = 0; i < f->n_chunks; i++) {
		while (sent < f->n_chunks && sent <= i + AHEAD) {
			r = send_chunk(f, &in, sent++);
			if (r < 0)
				return r;
		}
		r = await_chunk(f, i);
		if (r < 0)
			return r;
		reduce_whole(f, &out, i);
		if (i + 1 < f->n_chunks)
			call_consumed(f->w, f->base + i + 1);
	}
	return 0;
}

/* Where the slice of place @p begins in a chunk of @bytes; that of the place behind
 * the last is the end. */
static size_t slice_at(const struct flow *f, int p, size_t bytes)
{
	size_t at = (size_t)p * f->slice;

	return at < bytes ? at : bytes;
}

/* Reduce the own slice of chunk @i into the own slot, for all. */
static int reduce_slice(struct flow *f, uint32_t i)
{
	const void *sources[MAX_LOCAL_RANKS];
	size_t bytes = bytes_of_chunk(f, i);
	size_t from = slice_at(f, f->place, bytes),
	       end = slice_at(f, f->place + 1, bytes);
	struct slot *own = slot_of(f->w, f->w->local_rank, f->base + i);
	int r = await_chunk(f, i), n = f->w->n_active;
	void *to = data_of(own) + from;

	if (r < 0)
		return r;
	for (int p = 0; p < n; p++)
		sources[p] = slot_data(f, p, i) + from;
	combine(f->dtype, f->op, &to, 1, sources, n, (end - from) / f->element,
		f->factor);
	announce(f->w, &own->done, f->base + i + 1);
	return 0;
}

static int collect_slices(struct flow *f, struct cursor *out, uint32_t i)
{
	size_t bytes = bytes_of_chunk(f, i);

	for (int p = 0; p < f->w->n_active; p++) {
		int rank = f->w->active[p];
		struct slot *slot = slot_of(f->w, rank, f->base + i);
		size_t from = slice_at(f, p, bytes), end = slice_at(f, p + 1, bytes);
		int r = p == f->place ? 0
				      : await(f->w, rank, &slot->done, f->base + i + 1);

		if (r < 0)
			return r;
		copy_out(out, data_of(slot) + from, end - from);
	}
	if (i + 1 < f->n_chunks)
		call_consumed(f->w, f->base + i + 1);
	return 0;
}

static int reduce_by_slices(struct flow *f, const struct piece *pieces)
{
	struct cursor in = { pieces, 0 }, out = { pieces, 0 };
	int r = 0;

	skip(&in, bytes_of_chunk(f, 0));
	for (uint32_t t = 0; t < f->n_chunks + 2 && !r; t++) {
		if (t && t < f->n_chunks)
			r = send_chunk(f, &in, t);
		if (!r && t >= 1 && t <= f->n_chunks)
			r = reduce_slice(f, t - 1);
		if (!r && t >= 2)
			r = collect_slices(f, &out, t - 2);
	}
	return r;
}

/* ---- in the arenas ------------------------------------------------------------------
 */

/* Reduce this rank's share of everybody's memory, into everybody's memory. */
static void reduce_share(struct flow *f, const struct piece *pieces)
{
	const void *sources[MAX_LOCAL_RANKS];
	void *to[MAX_LOCAL_RANKS];
	struct cursor c = { pieces, 0 };
	size_t share = round_up((f->bytes + (uint64_t)f->w->n_active - 1) /
					(uint64_t)f->w->n_active,
				CACHE_LINE);
	uint64_t from = (uint64_t)f->place * share, end = from + share;
	uint8_t *own;

	end = end < f->bytes ? end : f->bytes;
	if (from >= end)
		return;
	skip(&c, from);
	while (from < end) {
		size_t len = take_stretch(&c, end - from, &own);

		for (int p = 0; p < f->w->n_active; p++) {
			to[p] = arena_of(f->w, f->w->active[p], own);
			sources[p] = to[p];
		}
		combine(f->dtype, f->op, to, f->w->n_active, sources, f->w->n_active,
			len / f->element, f->factor);
		from += len;
	}
}

static int reduce_in_arenas(struct flow *f, const struct piece *pieces)
{
	struct slot *own = slot_of(f->w, f->w->local_rank, f->base);

	reduce_share(f, pieces);
	announce(f->w, &own->done, f->base + 1);
	for (int p = 0; p < f->w->n_active; p++) {
		int rank = f->w->active[p];
		int r = p == f->place
				? 0
				: await(f->w, rank, &slot_of(f->w, rank, f->base)->done,
					f->base + 1);

		if (r < 0)
			return r;
	}
	return 0;
}

int flow_reduce(accel_world *w, const struct piece *pieces, size_t n, int dtype, int op,
		double factor)
{
	struct flow f = { .w = w,
			  .base = w->next,
			  .bytes = w->head.bytes,
			  .dtype = dtype,
			  .op = op,
			  .factor = factor,
			  .element = dtype_size(dtype) };
	struct cursor first = { pieces, 0 };
	enum places places;
	uint32_t n_slots;
	struct slot *slot;
	int r;

	f.chunk = chunk_of(w, f.bytes);
	f.n_chunks = chunks_of(f.bytes, f.chunk);
	if (in_arena(w, pieces, n, &w->head.tag))
		w->head.flags |= HEAD_ARENA;
	r = call_begin(w, &slot);
	if (r < 0)
		return r;
	if (!(w->head.flags & HEAD_ARENA))
		copy_in(&first, data_of(slot), bytes_of_chunk(&f, 0));
	r = call_meet(w);
	if (r < 0)
		return r;
	places = places_of(w, w->next);
	n_slots = slots_of_reduce(w, &w->head, w->next);
	if (places == IN_SOME) {
		f.base++;
		first = (struct cursor){ pieces, 0 };
		r = send_chunk(&f, &first, 0);
		if (r < 0)
			return r;
	}
	f.place = place_of(w);
	f.slice = round_up((f.chunk + (size_t)w->n_active - 1) / (size_t)w->n_active,
			   CACHE_LINE);
	if (op == ACCEL_MEAN && factor == 0)
		f.factor = 1.0 / w->n_active;
	if (places == IN_ARENAS)
		r = reduce_in_arenas(&f, pieces);
	else if (w->n_active <= 2 || f.bytes <= SMALL)
		r = reduce_by_chunks(&f, pieces);
	else
		r = reduce_by_slices(&f, pieces);
	if (r < 0)
		return r;
	call_end(w, n_slots);
	return 0;
}

/* ---- broadcast ------------------------------------------------------------------------
 */

static int send_rest(struct flow *f, const struct piece *pieces)
{
	struct cursor in = { pieces, 0 };

	skip(&in, bytes_of_chunk(f, 0));
	for (uint32_t i = 1; i < f->n_chunks; i++) {
		int r;

		/* Its own slots are nobody's concern but the others'. */
		call_consumed(f->w, f->base + i);
		r = send_chunk(f, &in, i);
		if (r < 0)
			return r;
	}
	return 0;
}

static int receive(struct flow *f, const struct piece *pieces, int root)
{
	struct cursor out = { pieces, 0 };

	for (uint32_t i = 0; i < f->n_chunks; i++) {
		int r = call_await_slot(f->w, root, f->base + i);

		if (r < 0)
			return r;
		copy_out(&out, data_of(slot_of(f->w, root, f->base + i)),
			 bytes_of_chunk(f, i));
		if (i + 1 < f->n_chunks)
			call_consumed(f->w, f->base + i + 1);
	}
	return 0;
}

/* The local rank of rank @root of the world, if it takes part. */
static int find_root(const accel_world *w, int root)
{
	for (int p = 0; p < w->n_active; p++)
		if ((int)cell_of(w, w->active[p])->rank == root)
			return w->active[p];
	return -1;
}

int flow_broadcast(accel_world *w, const struct piece *pieces)
{
	struct flow f = { .w = w, .base = w->next, .bytes = w->head.bytes, .element = 1 };
	struct cursor first = { pieces, 0 };
	struct slot *slot;
	int r = call_begin(w, &slot), root;

	if (r < 0)
		return r;
	f.chunk = chunk_of(w, f.bytes);
	f.n_chunks = chunks_of(f.bytes, f.chunk);
	if (w->rank == w->head.root)
		copy_in(&first, data_of(slot), bytes_of_chunk(&f, 0));
	r = call_meet(w);
	if (r < 0)
		return r;
	root = find_root(w, w->head.root);
	if (root == w->local_rank)
		r = send_rest(&f, pieces);
	else if (root >= 0)
		r = receive(&f, pieces, root);
	if (r < 0)
		return r;
	call_end(w, f.n_chunks);
	if (root < 0 && !(w->head.flags & HEAD_KEEP))
		return fail(
			ACCEL_E_MISMATCH,
			"broadcast from rank %d, which has no more data and left this "
			"call to the others",
			w->head.root);
	return 0;
}
