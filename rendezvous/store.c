/*
 * The stream of bytes: finding the dialect, cutting requests, buffers. What a
 * request does is in store_ops.c, keys and values are in keyspace.c.
 *
 * Requests are cut by a table of operand kinds and a cursor that survives from
 * one feed to the next, so a request that arrives byte by byte is looked at only
 * once.
 */

#include "rendezvous/store.h"

#include <errno.h>
#include <stdlib.h>

#include "base/err.h"
#include "rendezvous/store_impl.h"

const struct store_limits store_default_limits = {
	.key = 8 << 10,
	.value = 8 << 20,
	.list = 131072,
	.request = 256 << 20,
	.reply = 64 << 20,
	.backlog = 256 << 10,
	.burst = 256,
	.total = (size_t)1 << 30,
	.output = 512 << 20,
	.keys = 4 << 20,
	.items = 1 << 20,
	.client_waits = 262144,
	.watches = 1024,
	.waits = 8 << 20,
};

/* Before 2.2: the operation of each opcode. */
static const uint8_t old_ops[] = {
	OP_SET,        OP_COMPARE_SET,     OP_GET,
	OP_ADD,        OP_CHECK,           OP_WAIT,
	OP_GETNUMKEYS, OP_WATCH_OR_DELETE, OP_DELETE_OR_APPEND,
	OP_MULTI_GET,  OP_MULTI_SET,       OP_CANCEL_WAIT,
};
enum { OLD_MULTI_GET = 9, N_OLD_OPS = sizeof(old_ops) };

size_t store_bytes(const struct store *s)
{
	return s->keys.bytes + s->input_bytes + s->wait_bytes;
}

size_t store_output_bytes(const struct store *s)
{
	return s->output_bytes;
}

bool store_has_room(const struct store *s, size_t len)
{
	size_t held = store_bytes(s);

	return held <= s->limits.total && len <= s->limits.total - held;
}

/*
 * From bytes to requests. These return 1: go on, 0: more bytes are needed, or
 * negative: close the connection.
 */

static int find_dialect(struct store_client *c, struct slice in)
{
	uint32_t magic;

	if (c->dialect != UNKNOWN)
		return 1;
	if (!in.len)
		return 0;
	if (in.data[0] != OP_VALIDATE) {
		c->dialect = OLD;
		return 1;
	}
	/* VALIDATE, or the SET of an old client; no key is as long as the magic. */
	if (in.len < 1 + sizeof(magic))
		return 0;
	memcpy(&magic, in.data + 1, sizeof(magic));
	c->dialect = le32toh(magic) == VALIDATE_MAGIC ? CURRENT : OLD;
	return 1;
}

/* Opcodes from 7 on mean one thing in 2.0 and another in 2.1. WATCH_KEY comes
 * only on a connection of its own. */
static int old_op(struct store_client *c, uint8_t code)
{
	enum op op;

	if (code >= N_OLD_OPS || (code >= OLD_MULTI_GET && c->dialect == OLD_20))
		return -EPROTO;
	op = old_ops[code];
	if (op == OP_WATCH_OR_DELETE) {
		op = c->has_asked && c->dialect != OLD_20 ? OP_DELETE_KEY : OP_WATCH_KEY;
		if (op == OP_DELETE_KEY)
			c->dialect = OLD_21;
	} else if (op == OP_DELETE_OR_APPEND && c->dialect != OLD) {
		op = c->dialect == OLD_20 ? OP_DELETE_KEY : OP_APPEND;
	} else if (code >= OLD_MULTI_GET) {
		c->dialect = OLD_21;
	}
	/* A client asks only when it waits for nothing: it has given up. A byte
	 * sent for that wait later would be taken for part of another reply. */
	store_cancel_waits(c);
	return (int)op;
}

static int begin_request(struct store_client *c, struct slice in)
{
	struct request *q = &c->req;
	int op, r = find_dialect(c, in);

	if (r <= 0)
		return r;
	if (!in.len)
		return 0;
	if (c->dialect == CURRENT)
		op = in.data[0] < N_CURRENT_OPS ? in.data[0] : -EPROTO;
	else
		op = old_op(c, in.data[0]);
	if (op < 0)
		return op;
	c->has_asked |= op != OP_WATCH_KEY;
	*q = (struct request){ .fields = store_ops[op].fields,
			       .at = 1,
			       .op = (uint8_t)op };
	return 1;
}

static int scan_fixed(struct store_client *c, struct slice in, size_t len)
{
	if (in.len - c->req.at < len)
		return 0;
	c->req.at += len;
	return 1;
}

static int scan_bytes(struct store_client *c, struct slice in, size_t max)
{
	struct request *q = &c->req;
	const uint8_t *at = in.data + q->at;
	size_t left = in.len - q->at;
	uint64_t len;

	if (left < sizeof(len))
		return 0;
	len = take_u64(&at);
	if (len > max || q->at + sizeof(len) + len > c->store->limits.request)
		return -EMSGSIZE;
	return scan_fixed(c, in, sizeof(len) + len);
}

/* A list may be cut anywhere; the cursor remembers how many items are to come. */
static int scan_list(struct store_client *c, struct slice in, bool pairs)
{
	const struct store_limits *limits = &c->store->limits;
	struct request *q = &c->req;

	if (!q->in_list) {
		const uint8_t *at = in.data + q->at;

		if (in.len - q->at < sizeof(uint64_t))
			return 0;
		q->left = take_u64(&at);
		if (q->left > limits->list)
			return -EMSGSIZE;
		q->left *= pairs ? 2 : 1;
		q->at += sizeof(uint64_t);
		q->in_list = true;
	}
	for (; q->left; q->left--) {
		bool is_value = pairs && q->left % 2;
		int r = scan_bytes(c, in, is_value ? limits->value : limits->key);

		if (r <= 0)
			return r;
	}
	q->in_list = false;
	return 1;
}

static int scan_field(struct store_client *c, struct slice in)
{
	switch (*c->req.fields) {
	case 'k':
		return scan_bytes(c, in, c->store->limits.key);
	case 'v':
		return scan_bytes(c, in, c->store->limits.value);
	case 'i':
		return scan_fixed(c, in, sizeof(uint64_t));
	case 'n':
		return scan_fixed(c, in, sizeof(uint32_t));
	default:
		return scan_list(c, in, *c->req.fields == 'P');
	}
}

static int scan_request(struct store_client *c, struct slice in)
{
	struct request *q = &c->req;
	int r;

	if (!q->fields) {
		r = begin_request(c, in);
		if (r <= 0)
			return r;
	}
	for (;;) {
		for (; *q->fields; q->fields++) {
			r = scan_field(c, in);
			if (r <= 0)
				return r;
		}
		if (q->op != OP_DELETE_OR_APPEND)
			return 1;
		c->ambiguous = in.len == q->at;
		if (c->ambiguous)
			return 0;
		c->dialect = OLD_21;
		q->op = OP_APPEND;
		q->fields = "v";
	}
}

/* Serve one request where @in has all of it, and say how long it was: 0 where its
 * reply is cut. Returns 1: go on, 0: stop here, or negative. */
static int serve_one(struct store_client *c, struct slice in, size_t *ret_used)
{
	int r = scan_request(c, in);

	*ret_used = 0;
	if (r <= 0)
		return r;
	c->earlier = buf_len(&c->out);
	r = store_ops[c->req.op].run(c, in.data + 1);
	if (c->failed || r < 0)
		return c->failed ? c->failed : r;
	if (r == REPLY_CUT)
		return 1;
	*ret_used = c->req.at;
	c->req = (struct request){ 0 };
	return 1;
}

/* Serve what is complete in @in; @ret_used says how far that went. */
static int serve(struct store_client *c, struct slice in, size_t *ret_used)
{
	size_t used = 0, one, n = 0;
	int r = 1;

	c->store->current = c;
	for (; r > 0 && n < c->store->limits.burst && !store_client_is_paused(c); n++) {
		struct slice rest = { in.data + used, in.len - used };

		r = serve_one(c, rest, &one);
		used += one;
	}
	c->store->current = NULL;
	c->held = r > 0 && used < in.len;
	*ret_used = used;
	return r < 0 ? r : 0;
}

/* Drop @len bytes from a buffer; what it no longer needs is given back at once,
 * since thousands of connections are idle most of the time. */
static void drop(struct buf *b, size_t len, size_t *bytes)
{
	enum { SMALL = 64 << 10 };
	size_t cap = b->cap;

	buf_consume(b, len);
	if (!buf_len(b)) {
		buf_fini(b);
	} else if (cap > SMALL && buf_len(b) < cap / 8) {
		struct buf copy = { 0 };

		if (buf_add(&copy, buf_data(b), buf_len(b)) == 0) {
			buf_fini(b);
			*b = copy;
		}
	}
	*bytes -= cap - b->cap;
}

/* The rest of a request that has not arrived yet, or must wait. */
static int keep(struct store_client *c, const void *data, size_t len)
{
	struct store *s = c->store;
	size_t cap = c->in.cap;

	if (!len)
		return 0;
	if (!store_has_room(s, len))
		return -ENOBUFS;
	if (buf_add(&c->in, data, len) < 0)
		return -ENOMEM;
	s->input_bytes += c->in.cap - cap;
	return 0;
}

int store_client_feed(struct store_client *c, const void *data, size_t len)
{
	size_t used = 0;
	int r = c->failed;

	if (r < 0 || (!len && !buf_len(&c->in)))
		return r;
	if (buf_len(&c->in)) {
		r = keep(c, data, len);
		if (r == 0)
			r = serve(c, buf_slice(&c->in), &used);
		drop(&c->in, used, &c->store->input_bytes);
	} else {
		/* The usual case: whole requests, served where they lie. */
		r = serve(c, slice_of(data, len), &used);
		if (r == 0)
			r = keep(c, (const uint8_t *)data + used, len - used);
	}
	if (r < 0)
		c->failed = r;
	return r;
}

bool store_client_is_ambiguous(const struct store_client *c)
{
	return c->ambiguous && !c->failed;
}

int store_client_settle(struct store_client *c)
{
	if (!store_client_is_ambiguous(c))
		return c->failed;
	c->ambiguous = false;
	c->dialect = OLD_20;
	c->req.op = OP_DELETE_KEY;
	return store_client_feed(c, NULL, 0);
}

struct slice store_client_output(const struct store_client *c)
{
	return buf_len(&c->out) ? buf_slice(&c->out) : (struct slice){ 0 };
}

void store_client_sent(struct store_client *c, size_t len)
{
	drop(&c->out, len, &c->store->output_bytes);
}

bool store_client_is_paused(const struct store_client *c)
{
	return buf_len(&c->out) >= c->store->limits.backlog;
}

bool store_client_is_held(const struct store_client *c)
{
	return c->held;
}

int store_client_new(struct store_client **ret, struct store *s, on_store_output_fn *fn,
		     void *data, struct err *err)
{
	struct store_client *c = calloc(1, sizeof(*c));

	if (!c)
		return err_set(err, -ENOMEM, "store client");
	c->store = s;
	c->on_output = fn;
	c->data = data;
	*ret = c;
	return 0;
}

struct store_client *store_client_free(struct store_client *c)
{
	if (!c)
		return NULL;
	store_cancel_waits(c);
	store_cancel_watches(c);
	c->store->input_bytes -= c->in.cap;
	c->store->output_bytes -= c->out.cap;
	buf_fini(&c->in);
	buf_fini(&c->out);
	free(c);
	return NULL;
}

int store_new(struct store **ret, const struct store_limits *limits,
	      const uint8_t seed[16], struct err *err)
{
	struct store *s = calloc(1, sizeof(*s));

	if (!s)
		return err_set(err, -ENOMEM, "store");
	s->limits = limits ? *limits : store_default_limits;
	keyspace_init(&s->keys, seed);
	*ret = s;
	return 0;
}

struct store *store_free(struct store *s)
{
	if (!s)
		return NULL;
	keyspace_fini(&s->keys);
	free(s);
	return NULL;
}
