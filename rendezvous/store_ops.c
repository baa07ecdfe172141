/*
 * The store's operations, on keys and waits. Where PyTorch's own server errs this
 * one does what was meant: a COMPARE_SET that fails wakes nobody, and one push to a
 * queue ends one wait, also where others come first that need more, or name the
 * queue twice; a wait that is over leaves all lists.
 */

#include "rendezvous/store_impl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

struct waiter {
	struct key *key; /* NULL once it came */
	struct waiter *prev, *next;
	struct wait *wait;
};

/* One WAIT, BARRIER or WATCH_KEY. */
struct wait {
	struct store_client *client;
	struct wait *prev, *next;
	enum wait_kind kind;
	uint32_t n, missing;
	struct waiter waiters[];
};

enum {
	READY = 0,
	NOT_READY = 1,
	STOP_WAITING = 0,
	WAIT_CANCELED = 1,
};

enum watch_event {
	KEY_UPDATED,
	KEY_CREATED,
	KEY_DELETED,
	KEY_CALLBACK_REGISTERED,
};

/* From a request that is complete, so without a check. */
static struct slice take_bytes(const uint8_t **at)
{
	size_t len = take_u64(at);
	struct slice s = { *at, len };

	*at += len;
	return s;
}

/*
 * Output.
 */

/* Whoever fed the store looks at that client's output anyway. */
static void tell_output(struct store_client *c)
{
	if (c != c->store->current)
		c->on_output(c->data);
}

/* For a client to be closed while another one's request is served. */
static void fail(struct store_client *c, int code)
{
	if (c->failed)
		return;
	c->failed = code;
	tell_output(c);
}

static void emit(struct store_client *c, const void *data, size_t len)
{
	size_t cap = c->out.cap;
	bool was_empty = !buf_len(&c->out);

	if (c->failed)
		return;
	if (buf_add(&c->out, data, len) < 0) {
		fail(c, -ENOMEM);
		return;
	}
	c->store->output_bytes += c->out.cap - cap;
	if (was_empty)
		tell_output(c);
}

static void emit_u8(struct store_client *c, uint8_t v)
{
	emit(c, &v, sizeof(v));
}

static void emit_u64(struct store_client *c, uint64_t v)
{
	v = htole64(v);
	emit(c, &v, sizeof(v));
}

/* Little output is always given, whatever others leave unread. */
static bool has_output_room(const struct store_client *c, size_t len)
{
	const struct store *s = c->store;

	return buf_len(&c->out) + len <= s->limits.backlog ||
	       (s->output_bytes <= s->limits.output &&
		len <= s->limits.output - s->output_bytes);
}

/* Room for a large value and no more, where a buffer by itself would take up to
 * twice as much. It is only for saving: where memory is short emit() says so. */
static void reserve_exactly(struct store_client *c, size_t len)
{
	enum { LARGE = 64 << 10 };
	uint8_t *mem;

	if (c->failed || c->out.cap || len < LARGE)
		return;
	mem = malloc(len);
	if (!mem)
		return;
	c->out = (struct buf){ .mem = mem, .cap = len };
	c->store->output_bytes += len;
}

/* Only this kind of output can be large, so only here are limits looked at: a
 * client is not made to fail by the one byte that ends its wait. */
static void emit_bytes(struct store_client *c, struct slice bytes)
{
	size_t earlier = c == c->store->current ? c->earlier : 0;
	size_t len = bytes.len + sizeof(uint64_t);

	if (buf_len(&c->out) - earlier + len > c->store->limits.reply)
		fail(c, -EMSGSIZE);
	else if (!has_output_room(c, len))
		fail(c, -ENOBUFS);
	reserve_exactly(c, len);
	emit_u64(c, bytes.len);
	emit(c, bytes.data, bytes.len);
}

/*
 * Waits.
 */

static void list_add(struct wait_list *l, struct waiter *n)
{
	n->prev = l->last;
	n->next = NULL;
	if (l->last)
		l->last->next = n;
	else
		l->first = n;
	l->last = n;
}

static void list_remove(struct wait_list *l, struct waiter *n)
{
	if (n->prev)
		n->prev->next = n->next;
	else
		l->first = n->next;
	if (n->next)
		n->next->prev = n->prev;
	else
		l->last = n->prev;
}

static size_t wait_size(size_t n)
{
	return sizeof(struct wait) + n * sizeof(struct waiter);
}

/* The client's list that a wait of @kind is on, and how many keys that names. */
static struct wait **list_of(struct store_client *c, enum wait_kind kind, size_t **ret_n)
{
	*ret_n = kind == WAIT_WATCH ? &c->n_watches : &c->n_waits;
	return kind == WAIT_WATCH ? &c->watches : &c->waits;
}

/* A wait for up to @n keys, none of which is added yet. It belongs to its client. */
static int wait_new(struct wait **ret, struct store_client *c, enum wait_kind kind,
		    size_t n)
{
	struct store *s = c->store;
	size_t *count, max = s->limits.client_waits;
	struct wait *w, **list = list_of(c, kind, &count);

	if (kind == WAIT_WATCH)
		max = s->limits.watches;
	if (n > max - *count || n > s->limits.waits - s->n_waits ||
	    !store_has_room(s, wait_size(n)))
		return -ENOBUFS;
	w = calloc(1, wait_size(n));
	if (!w)
		return -ENOMEM;
	w->client = c;
	w->kind = kind;
	w->n = (uint32_t)n;
	w->next = *list;
	if (w->next)
		w->next->prev = w;
	*list = w;
	*count += n;
	s->n_waits += n;
	s->wait_bytes += wait_size(n);
	*ret = w;
	return 0;
}

/* Off all lists. A key that only this wait kept alive goes with it. */
static void wait_free(struct wait *w)
{
	struct store_client *c = w->client;
	struct store *s = c->store;
	size_t *count;
	struct wait **list = list_of(c, w->kind, &count);

	for (size_t i = 0; i < w->n; i++) {
		struct key *k = w->waiters[i].key;

		if (!k)
			continue;
		list_remove(&k->waits[w->kind], &w->waiters[i]);
		keyspace_release(&s->keys, k);
	}
	if (w->prev)
		w->prev->next = w->next;
	else
		*list = w->next;
	if (w->next)
		w->next->prev = w->prev;
	*count -= w->n;
	s->n_waits -= w->n;
	s->wait_bytes -= wait_size(w->n);
	free(w);
}

/* Add @k to what @w waits for. One added twice counts twice and comes twice. */
static void wait_add(struct wait *w, struct key *k)
{
	struct waiter *n = &w->waiters[w->missing++];

	n->key = k;
	n->wait = w;
	list_add(&k->waits[w->kind], n);
}

void store_cancel_waits(struct store_client *c)
{
	while (c->waits)
		wait_free(c->waits);
}

void store_cancel_watches(struct store_client *c)
{
	while (c->watches)
		wait_free(c->watches);
}

/* @k came. With @one, stop once somebody's wait is over. */
static void wake(struct key *k, enum wait_kind kind, bool one)
{
	struct waiter *n;

	while ((n = k->waits[kind].first)) {
		struct wait *w = n->wait;
		struct store_client *c = w->client;

		list_remove(&k->waits[kind], n);
		n->key = NULL;
		if (--w->missing)
			continue;
		wait_free(w);
		emit_u8(c, STOP_WAITING);
		if (one)
			return;
	}
}

static void wake_all(struct key *k)
{
	wake(k, WAIT_KEYS, false);
	wake(k, WAIT_BARRIER, false);
}

/* Before the change, while the old value is still there to be shown. */
static void tell_watchers(struct key *k, enum watch_event event, struct slice old,
			  struct slice now)
{
	for (struct waiter *n = k->waits[WAIT_WATCH].first; n; n = n->next) {
		struct store_client *c = n->wait->client;

		emit_u8(c, (uint8_t)event);
		emit_bytes(c, key_name(k));
		emit_bytes(c, old);
		emit_bytes(c, now);
	}
}

/*
 * Values.
 */

/* Find or create @name for a value of up to @len more bytes, within the limits. */
static int key_for(struct key **ret, struct store *s, struct slice name, size_t len)
{
	struct key *k;

	if (!store_has_room(s, sizeof(*k) + name.len + len))
		return -ENOBUFS;
	k = keyspace_get(&s->keys, name);
	if (!k)
		return -ENOMEM;
	*ret = k;
	return 0;
}

/* Store, and tell those who watch; whom to wake is left to the caller. */
static int put(struct key **ret, struct store *s, struct slice name, struct slice value)
{
	struct key *k;
	int r = key_for(&k, s, name, value.len);

	if (r < 0)
		return r;
	if (!k->has_value && s->keys.n_values >= s->limits.keys)
		r = -ENOBUFS;
	if (r == 0) {
		tell_watchers(k, k->has_value ? KEY_UPDATED : KEY_CREATED, key_value(k),
			      value);
		r = key_assign(&s->keys, k, value);
	}
	if (r < 0) {
		keyspace_release(&s->keys, k);
		return r;
	}
	*ret = k;
	return 0;
}

static int put_and_wake(struct store *s, struct slice name, struct slice value)
{
	struct key *k;
	int r = put(&k, s, name, value);

	if (r == 0)
		wake_all(k);
	return r;
}

/* As C++'s stoll reads it, which PyTorch's server uses: blanks before and
 * anything after the number are passed over. */
static int parse_counter(int64_t *ret, struct slice text)
{
	size_t i = 0, digits = 0;
	bool negative;
	int64_t v = 0;

	while (i < text.len &&
	       (text.data[i] == ' ' || (text.data[i] >= '\t' && text.data[i] <= '\r')))
		i++;
	negative = i < text.len && text.data[i] == '-';
	if (i < text.len && (negative || text.data[i] == '+'))
		i++;
	for (; i < text.len && text.data[i] >= '0' && text.data[i] <= '9';
	     i++, digits++) {
		int digit = text.data[i] - '0';

		if (__builtin_mul_overflow(v, 10, &v) ||
		    __builtin_add_overflow(v, negative ? -digit : digit, &v))
			return -ERANGE;
	}
	*ret = v;
	return digits ? 0 : -EINVAL;
}

/* Add @delta to the counter @name, which is 0 where it is missing. */
static int count(int64_t *ret, struct key **ret_key, struct store *s, struct slice name,
		 int64_t delta)
{
	struct key *k = keyspace_find(&s->keys, name);
	int64_t v = 0;
	char text[24];
	int r, len;

	if (k && k->has_value) {
		r = parse_counter(&v, key_value(k));
		if (r < 0)
			return r;
	}
	v = (int64_t)((uint64_t)v + (uint64_t)delta);
	len = snprintf(text, sizeof(text), "%lld", (long long)v);
	*ret = v;
	return put(ret_key, s, name, slice_of(text, (size_t)len));
}

/*
 * The operations. @at is at the first operand; all of them have arrived and are
 * within the limits. A negative result closes the connection.
 */

static int do_validate(struct store_client *c, const uint8_t *at)
{
	uint32_t magic;

	(void)c;
	memcpy(&magic, at, sizeof(magic));
	return le32toh(magic) == VALIDATE_MAGIC ? 0 : -EPROTO;
}

static int do_ping(struct store_client *c, const uint8_t *at)
{
	emit(c, at, sizeof(uint32_t));
	return 0;
}

static int do_set(struct store_client *c, const uint8_t *at)
{
	struct slice name = take_bytes(&at), value = take_bytes(&at);

	return put_and_wake(c->store, name, value);
}

static int do_compare_set(struct store_client *c, const uint8_t *at)
{
	struct slice name = take_bytes(&at);
	struct slice expected = take_bytes(&at), desired = take_bytes(&at);
	struct key *k = keyspace_find(&c->store->keys, name);
	bool exists = k && k->has_value;
	int r = 0;

	if (exists ? slice_eq(key_value(k), expected) : !expected.len) {
		r = put_and_wake(c->store, name, desired);
		emit_bytes(c, desired);
	} else {
		/* To a missing key the protocol has no better answer. */
		emit_bytes(c, exists ? key_value(k) : expected);
	}
	return r;
}

static struct slice value_of(struct store_client *c, struct slice name)
{
	struct key *k = keyspace_find(&c->store->keys, name);

	return k ? key_value(k) : (struct slice){ 0 };
}

static int do_get(struct store_client *c, const uint8_t *at)
{
	emit_bytes(c, value_of(c, take_bytes(&at)));
	return 0;
}

/* The one reply that a short request can make as long as it likes: it is given in
 * pieces, as the client reads them. */
static int do_multi_get(struct store_client *c, const uint8_t *at)
{
	struct request *q = &c->req;
	const uint8_t *start = at;

	if (!q->answered)
		q->left = take_u64(&at);
	else
		at += q->answered;
	for (; q->left && !c->failed; q->left--) {
		if (store_client_is_paused(c))
			break;
		c->earlier = buf_len(&c->out); /* each value is a reply of its own */
		emit_bytes(c, value_of(c, take_bytes(&at)));
	}
	q->answered = (size_t)(at - start);
	return q->left ? REPLY_CUT : 0;
}

/* Pairs before one that fails stay set, as if they had been sent one by one. */
static int do_multi_set(struct store_client *c, const uint8_t *at)
{
	int r = 0;

	for (uint64_t n = take_u64(&at); n && r == 0; n--) {
		struct slice name = take_bytes(&at), value = take_bytes(&at);

		r = put_and_wake(c->store, name, value);
	}
	return r;
}

static int do_append(struct store_client *c, const uint8_t *at)
{
	struct slice name = take_bytes(&at), more = take_bytes(&at);
	struct store *s = c->store;
	struct key *k = keyspace_find(&s->keys, name);
	size_t old;
	int r;

	if (!k || !k->has_value)
		return put_and_wake(s, name, more);
	old = k->value_len;
	if (old + more.len > s->limits.reply - sizeof(uint64_t))
		return -EMSGSIZE;
	/* Growing may keep half as much again in reserve. */
	if (!store_has_room(s, more.len + old / 2))
		return -ENOBUFS;
	r = key_append(&s->keys, k, more);
	if (r < 0)
		return r;
	tell_watchers(k, KEY_UPDATED, slice_of(k->value, old), key_value(k));
	wake_all(k);
	return 0;
}

static int do_add(struct store_client *c, const uint8_t *at)
{
	struct slice name = take_bytes(&at);
	struct key *k;
	int64_t v;
	int r = count(&v, &k, c->store, name, (int64_t)take_u64(&at));

	if (r < 0)
		return r;
	wake_all(k);
	emit_u64(c, (uint64_t)v);
	return 0;
}

/* How many keys of a list are missing; a repeated one counts each time. */
static size_t count_missing(struct store_client *c, const uint8_t *at)
{
	size_t missing = 0;

	for (uint64_t n = take_u64(&at); n; n--) {
		struct key *k = keyspace_find(&c->store->keys, take_bytes(&at));

		missing += !k || !key_is_present(k);
	}
	return missing;
}

static int do_check(struct store_client *c, const uint8_t *at)
{
	emit_u8(c, count_missing(c, at) ? NOT_READY : READY);
	return 0;
}

static int do_wait(struct store_client *c, const uint8_t *at)
{
	size_t missing = count_missing(c, at);
	struct wait *w;
	int r;

	if (!missing) {
		emit_u8(c, STOP_WAITING);
		return 0;
	}
	r = wait_new(&w, c, WAIT_KEYS, missing);
	for (uint64_t n = take_u64(&at); n && r == 0; n--) {
		struct slice name = take_bytes(&at);
		struct key *k;

		r = key_for(&k, c->store, name, 0);
		if (r == 0 && !key_is_present(k))
			wait_add(w, k);
	}
	return r;
}

static int do_cancel_wait(struct store_client *c, const uint8_t *at)
{
	(void)at;
	store_cancel_waits(c);
	emit_u8(c, WAIT_CANCELED);
	return 0;
}

/* The counter is an ordinary value and is never reset: one key, one barrier. An
 * arrival whose client gave up still counts. */
static int do_barrier(struct store_client *c, const uint8_t *at)
{
	struct slice name = take_bytes(&at);
	int64_t arrived, world = (int64_t)take_u64(&at);
	struct key *k;
	struct wait *w;
	int r = count(&arrived, &k, c->store, name, 1);

	if (r < 0)
		return r;
	wake(k, WAIT_KEYS, false);
	if (arrived >= world) {
		wake(k, WAIT_BARRIER, false);
		emit_u8(c, STOP_WAITING);
		return 0;
	}
	r = wait_new(&w, c, WAIT_BARRIER, 1);
	if (r == 0)
		wait_add(w, k);
	return r;
}

static int do_getnumkeys(struct store_client *c, const uint8_t *at)
{
	(void)at;
	emit_u64(c, c->store->keys.n_values);
	return 0;
}

static int do_delete_key(struct store_client *c, const uint8_t *at)
{
	struct keyspace *keys = &c->store->keys;
	struct key *k = keyspace_find(keys, take_bytes(&at));
	bool exists = k && k->has_value;

	if (exists) {
		tell_watchers(k, KEY_DELETED, key_value(k), (struct slice){ 0 });
		key_clear(keys, k);
		keyspace_release(keys, k);
	}
	emit_u64(c, exists);
	return 0;
}

/* An item is for one, so one waiter is woken; whoever pops second gets nothing. */
static int do_queue_push(struct store_client *c, const uint8_t *at)
{
	struct slice name = take_bytes(&at), item = take_bytes(&at);
	struct store *s = c->store;
	struct key *k;
	int r;

	if (s->keys.n_items >= s->limits.items)
		return -ENOBUFS;
	r = key_for(&k, s, name, sizeof(struct item) + item.len);
	if (r < 0)
		return r;
	r = key_push(&s->keys, k, item);
	if (r < 0)
		keyspace_release(&s->keys, k);
	else
		wake(k, WAIT_KEYS, true);
	return r;
}

static int do_queue_pop(struct store_client *c, const uint8_t *at)
{
	struct keyspace *keys = &c->store->keys;
	struct key *k = keyspace_find(keys, take_bytes(&at));
	size_t n = k ? k->n_items : 0;

	emit_u64(c, n);
	if (!n)
		return 0;
	emit_bytes(c, slice_of(k->first_item->data, k->first_item->len));
	if (c->failed)
		return c->failed; /* the item stays for somebody else */
	key_pop(keys, k);
	keyspace_release(keys, k);
	return 0;
}

static int do_queue_len(struct store_client *c, const uint8_t *at)
{
	struct key *k = keyspace_find(&c->store->keys, take_bytes(&at));

	emit_u64(c, k ? k->n_items : 0);
	return 0;
}

static void list_key(void *data, const struct key *k)
{
	if (k->has_value)
		emit_bytes(data, key_name(k));
}

static int do_list_keys(struct store_client *c, const uint8_t *at)
{
	(void)at;
	emit_u64(c, c->store->keys.n_values);
	keyspace_visit(&c->store->keys, list_key, c);
	return 0;
}

static int do_watch_key(struct store_client *c, const uint8_t *at)
{
	struct key *k = NULL;
	struct wait *w;
	int r = wait_new(&w, c, WAIT_WATCH, 1);

	if (r == 0)
		r = key_for(&k, c->store, take_bytes(&at), 0);
	if (r < 0)
		return r;
	/* Watched twice is told twice, as in PyTorch's own server. */
	w->waiters[0] = (struct waiter){ .key = k, .wait = w };
	list_add(&k->waits[WAIT_WATCH], &w->waiters[0]);
	emit_u8(c, KEY_CALLBACK_REGISTERED);
	return 0;
}

const struct op_row store_ops[N_OPS] = {
	[OP_VALIDATE] = { "n", do_validate },
	[OP_SET] = { "kv", do_set },
	[OP_COMPARE_SET] = { "kvv", do_compare_set },
	[OP_GET] = { "k", do_get },
	[OP_ADD] = { "ki", do_add },
	[OP_CHECK] = { "K", do_check },
	[OP_WAIT] = { "K", do_wait },
	[OP_GETNUMKEYS] = { "", do_getnumkeys },
	[OP_DELETE_KEY] = { "k", do_delete_key },
	[OP_APPEND] = { "kv", do_append },
	[OP_MULTI_GET] = { "K", do_multi_get },
	[OP_MULTI_SET] = { "P", do_multi_set },
	[OP_CANCEL_WAIT] = { "", do_cancel_wait },
	[OP_PING] = { "n", do_ping },
	[OP_QUEUE_PUSH] = { "kv", do_queue_push },
	[OP_QUEUE_POP] = { "k", do_queue_pop },
	[OP_QUEUE_LEN] = { "k", do_queue_len },
	[OP_LIST_KEYS] = { "", do_list_keys },
	[OP_BARRIER] = { "ki", do_barrier },
	[OP_WATCH_KEY] = { "k", do_watch_key },
	[OP_DELETE_OR_APPEND] = { "k", NULL }, /* resolved before it runs */
};
