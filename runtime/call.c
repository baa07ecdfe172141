/*
 * The frame of every collective: checks, the exchange of heads, who takes part,
 * and the sentence for ranks that want different things.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/world.h"

static const struct {
	const char *name;
	bool has_array; /* dtype and dims say something */
} kinds[N_KINDS] = {
	[KIND_NONE] = { "joining", false },     [KIND_BARRIER] = { "barrier", false },
	[KIND_REDUCE] = { "reduce", true },     [KIND_BROADCAST] = { "broadcast", true },
	[KIND_GATHER] = { "gather", true },     [KIND_PREPARE] = { "prepare", false },
	[KIND_TOUCHED] = { "backward", false }, [KIND_BACKWARD] = { "backward", true },
	[KIND_ALLOC] = { "alloc", false },      [KIND_STOP] = { "should_stop", false },
	[KIND_JOIN] = { "join", false },
};

static const struct {
	const char *name;
	uint8_t size;
} dtypes[] = {
	[ACCEL_FLOAT32] = { "float32", 4 }, [ACCEL_FLOAT64] = { "float64", 8 },
	[ACCEL_FLOAT16] = { "float16", 2 }, [ACCEL_BFLOAT16] = { "bfloat16", 2 },
	[ACCEL_INT8] = { "int8", 1 },       [ACCEL_UINT8] = { "uint8", 1 },
	[ACCEL_INT16] = { "int16", 2 },     [ACCEL_INT32] = { "int32", 4 },
	[ACCEL_INT64] = { "int64", 8 },     [ACCEL_BOOL] = { "bool", 1 },
};

static const char *const ops[] = {
	[0] = "",
	[ACCEL_SUM] = "sum",
	[ACCEL_MEAN] = "mean",
	[ACCEL_MIN] = "min",
	[ACCEL_MAX] = "max",
};

enum { N_DTYPES = sizeof(dtypes) / sizeof(dtypes[0]) };

size_t dtype_size(int dtype)
{
	return dtype > 0 && dtype < N_DTYPES ? dtypes[dtype].size : 0;
}

const char *dtype_name(int dtype)
{
	return dtype > 0 && dtype < N_DTYPES ? dtypes[dtype].name : "unknown";
}

bool is_floating(int dtype)
{
	return dtype >= ACCEL_FLOAT32 && dtype <= ACCEL_BFLOAT16;
}

static int describe_array(const struct head *head, char *text, size_t size)
{
	int n = snprintf(text, size, " of %s (", dtype_name(head->dtype));

	for (int i = 0; i < head->n_dims && i < ACCEL_MAX_DIMS && n < (int)size; i++)
		n += snprintf(text + n, size - (size_t)n, "%s%llu", i ? ", " : "",
			      (unsigned long long)head->dims[i]);
	if (n < (int)size)
		n += snprintf(text + n, size - (size_t)n, "%s)",
			      head->n_dims == 1 ? "," : "");
	return n < (int)size ? n : (int)size - 1;
}

/* What differs by kind, behind its name. */
void describe(const struct head *head, char *text, size_t size)
{
	unsigned kind = head->kind < N_KINDS ? head->kind : KIND_NONE;
	int n = snprintf(text, size, "%s", kinds[kind].name);

	if (kinds[kind].has_array && kind != KIND_BACKWARD)
		n += describe_array(head, text + n, size - (size_t)n);
	if (kind == KIND_REDUCE && head->op <= ACCEL_MAX)
		n += snprintf(text + n, size - (size_t)n, " by %s", ops[head->op]);
	if (kind == KIND_BROADCAST)
		n += snprintf(text + n, size - (size_t)n, " from rank %d", head->root);
	if (kind == KIND_PREPARE || kind == KIND_TOUCHED)
		n += snprintf(text + n, size - (size_t)n,
			      " with %llu parameters of %llu elements",
			      (unsigned long long)head->dims[0],
			      (unsigned long long)head->dims[1]);
	if (kind == KIND_ALLOC)
		n += snprintf(text + n, size - (size_t)n, " of %llu bytes",
			      (unsigned long long)head->tag);
	if (head->label[0] && n < (int)size)
		(void)snprintf(text + n, size - (size_t)n, " (%.*s)", LABEL_MAX - 1,
			       head->label);
}

void accel_label(accel_world *w, const char *label)
{
	if (w && !is_forked(w))
		(void)snprintf(w->label, sizeof(w->label), "%s", label ? label : "");
}

/* ---- any call ------------------------------------------------------------------ */

bool is_forked(const accel_world *w)
{
	return w->mark ? *(volatile uint32_t *)w->mark == 0 : getpid() != w->pid;
}

int enter(accel_world *w, enum pending allowed)
{
	if (!w)
		return fail(ACCEL_E_INVALID, "no world: accel_init() comes first");
	if (is_forked(w))
		return fail(ACCEL_E_FORKED,
			    "this process is a fork of rank %d (process %d) and takes no "
			    "part in its collectives; call accel from the process that "
			    "called accel_init()",
			    w->rank, w->pid);
	if (__atomic_exchange_n(&w->busy, true, __ATOMIC_ACQUIRE))
		return fail(ACCEL_E_BUSY,
			    "another thread is in a call of this world; one thread at a "
			    "time");
	if (world_broken(w)) {
		w->pending = NOTHING_PENDING;
		w->pending_model = NULL;
		return leave(w, world_broken(w));
	}
	if (w->pending != allowed && w->pending != NOTHING_PENDING) {
		__atomic_store_n(&w->busy, false, __ATOMIC_RELEASE);
		return fail(ACCEL_E_INVALID, "%s must be called first",
			    w->pending == GATHER_PENDING ? "accel_gather_into()"
							 : "accel_backward() again");
	}
	w->deadline_ms = 0;
	return 0;
}

int leave(accel_world *w, int r)
{
	w->label[0] = 0;
	__atomic_store_n(&w->busy, false, __ATOMIC_RELEASE);
	return r;
}

/* ---- the exchange of heads ------------------------------------------------------- */

int call_await_free(accel_world *w, uint64_t number)
{
	uint64_t need = number + 1 > RING_SLOTS ? number + 1 - RING_SLOTS : 0;

	/* Only what others have read counts, so no rank waits for itself. */
	if (w->free_till > number)
		return 0;
	for (int r = 0; r < w->local_size; r++) {
		int e = r == w->local_rank ? 0
					   : await(w, r, &cell_of(w, r)->consumed, need);

		if (e < 0)
			return e;
	}
	w->free_till = number + 1;
	return 0;
}

int call_await_slot(accel_world *w, int rank, uint64_t number)
{
	return await(w, rank, &slot_of(w, rank, number)->seq, number + 1);
}

int call_begin(accel_world *w, struct slot **ret)
{
	struct slot *slot = slot_of(w, w->local_rank, w->next);
	int r = call_await_free(w, w->next);

	(void)note_cpu(w);
	if (r < 0)
		return r;
	memcpy(w->head.label, w->label, sizeof(w->label));
	slot->head = w->head;
	slot->head.generation = w->generation;
	*ret = slot;
	return 0;
}

/* Must all ranks have the same dims? Of a gather, all but the first. */
static bool same_dims(const struct head *a, const struct head *b)
{
	int first = a->kind == KIND_GATHER ? 1 : 0;

	if (a->n_dims != b->n_dims)
		return false;
	for (int i = first; i < a->n_dims; i++)
		if (a->dims[i] != b->dims[i])
			return false;
	return true;
}

static bool same_wish(const struct head *a, const struct head *b)
{
	/* Where the data of these lies is each rank's own business. */
	bool anywhere = a->kind == KIND_REDUCE || a->kind == KIND_BACKWARD;

	return a->kind == b->kind && a->dtype == b->dtype && a->op == b->op &&
	       a->root == b->root && same_dims(a, b) && strcmp(a->label, b->label) == 0 &&
	       (anywhere || (a->flags == b->flags && a->tag == b->tag));
}

static const struct head *head_at(const accel_world *w, int rank, uint64_t number)
{
	return &slot_of(w, rank, number)->head;
}

/* One line for each rank, the same text on all ranks. */
static int mismatch(accel_world *w, uint64_t number)
{
	char text[3072];
	size_t n = 0;
	bool alike = true;
	const struct head *first = head_at(w, w->active[0], number);

	for (int i = 0; i < w->n_active; i++)
		alike &= head_at(w, w->active[i], number)->kind == first->kind;
	n += (size_t)snprintf(text, sizeof(text), "%s: the ranks %s; nothing was moved",
			      kinds[first->kind < N_KINDS ? first->kind : 0].name,
			      alike ? "do not want the same" : "call different things");
	for (int i = 0; i < w->n_active && n < sizeof(text) - 320; i++) {
		const struct head *head = head_at(w, w->active[i], number);
		char wish[256];

		describe(head, wish, sizeof(wish));
		n += (size_t)snprintf(text + n, sizeof(text) - n, "\n  rank %u: %s%s",
				      cell_of(w, w->active[i])->rank, wish,
				      head->flags & HEAD_KEEP ? ", keeping its values"
							      : "");
	}
	if (n >= sizeof(text) - 320)
		(void)snprintf(text + n, sizeof(text) - n, "\n  ... (%d ranks)",
			       w->n_active);
	else if (alike && (first->kind == KIND_PREPARE || first->kind == KIND_TOUCHED))
		(void)snprintf(
			text + n, sizeof(text) - n,
			"\n  where the numbers are equal, order, shapes, dtypes or "
			"requires_grad differ");
	return fail(ACCEL_E_MISMATCH, "%s", text);
}

/* Of programs that run one after another in a wrapper, a rank has ended its one with
 * fewer calls than the others. */
static int other_program(accel_world *w, int rank, uint32_t generation)
{
	bool is_ahead = (int32_t)(generation - w->generation) > 0;
	const struct cell *finished = cell_of(w, is_ahead ? rank : w->local_rank);
	const struct cell *waiting = cell_of(w, is_ahead ? w->local_rank : rank);
	const struct head *head = is_ahead ? &w->head : head_at(w, rank, w->next);
	char call[256], text[ABORT_TEXT];

	describe(head, call, sizeof(call));
	(void)snprintf(text, sizeof(text),
		       "rank %u has finished, and its next program began, while rank %u "
		       "waits for it in %s",
		       finished->rank, waiting->rank, call);
	return break_world(w, ACCEL_E_LOST, (int)finished->rank, text);
}

int call_meet(accel_world *w)
{
	uint64_t number = w->next;
	struct slot *own = slot_of(w, w->local_rank, number);
	bool same = true;
	int r = 0;

	w->n_active = 0;
	announce(w, &own->seq, number + 1);
	for (int i = 0; i < w->local_size; i++) {
		const struct head *head = head_at(w, i, number);

		r = i == w->local_rank ? 0 : call_await_slot(w, i, number);
		if (r < 0)
			return r;
		if (head->generation != w->generation)
			return other_program(w, i, head->generation);
		if (head->kind == KIND_JOIN)
			continue;
		w->active[w->n_active++] = i;
		same &= same_wish(head_at(w, w->active[0], number), head);
	}
	if (same)
		return 0;
	r = mismatch(w, number);
	call_end(w, 1);
	return r;
}

void call_consumed(accel_world *w, uint64_t number)
{
	announce(w, &cell_of(w, w->local_rank)->consumed, number);
}

void call_end(accel_world *w, uint32_t n_slots)
{
	w->next += n_slots;
	call_consumed(w, w->next);
}
