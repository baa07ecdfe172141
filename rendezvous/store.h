#pragma once

/*
 * The key-value store behind torch.distributed: an engine that speaks the wire
 * protocol of PyTorch's TCPStore, in all its dialects from 1.13 on. Bytes in,
 * bytes out: no socket and no clock; store_server.h gives it both.
 *
 * A client whose request breaks the protocol or a limit is to be closed; nobody
 * else notices. A length that a peer announces costs nothing until its bytes
 * have arrived.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

struct err;
struct store;
struct store_client;

struct store_limits {
	size_t key;          /* bytes of one key */
	size_t value;        /* bytes of one value in a request */
	size_t list;         /* keys or pairs in one request */
	size_t request;      /* bytes of one request */
	size_t reply;        /* bytes of one reply, where it is not sent in pieces, or
			      * unread by a watcher; also of a value grown by APPEND */
	size_t backlog;      /* unread output from which on a client's requests wait */
	size_t burst;        /* requests served in one call */
	size_t total;        /* bytes held but for output, see store_bytes() */
	size_t output;       /* bytes of all unread output; see below */
	size_t keys;         /* with a value */
	size_t items;        /* in all queues */
	size_t client_waits; /* keys that one client waits for */
	size_t watches;      /* keys that one client watches */
	size_t waits;        /* both, of all clients together */
};

/* A client that reads nothing is held to @backlog and one value more, and to a
 * LIST_KEYS reply. Where everybody's output is at its limit, whoever asks for
 * more than fits into @backlog is closed; small replies are still given, and
 * requests that store something do not notice. */
extern const struct store_limits store_default_limits;

/* @seed should be random and secret: it keeps peers from choosing keys that
 * collide in the hash table. NULL limits are the default ones. */
int store_new(struct store **ret, const struct store_limits *limits,
	      const uint8_t seed[16], struct err *err);
/* Every client must be free by then. */
struct store *store_free(struct store *s);

/* Called when another client's request gave this one output where it had none,
 * or made it fail. It may take note, but not call the store. */
typedef void on_store_output_fn(void *data);
int store_client_new(struct store_client **ret, struct store *s, on_store_output_fn *fn,
		     void *data, struct err *err);
/* Forgets what the client waits for; its keys stay. */
struct store_client *store_client_free(struct store_client *c);

/* Bytes that arrived, in pieces of any size; also with @len 0, to go on after
 * the output was sent or a burst was served. Returns 0, or negative: close the
 * connection. */
int store_client_feed(struct store_client *c, const void *data, size_t len);

/* What is to be sent; store_client_sent() drops what was. */
struct slice store_client_output(const struct store_client *c);
void store_client_sent(struct store_client *c, size_t len);

/* Is so much output unread that no request is served? Stop feeding until then. */
bool store_client_is_paused(const struct store_client *c);

/* Is there input that was not looked at, as the client is paused or had its burst
 * of requests? Feed it, without more bytes, once it is not paused. */
bool store_client_is_held(const struct store_client *c);

/* The old dialects use one number for "delete this key" (2.0 and before) and for
 * "append to this key what follows" (2.1). While this returns true, nothing has
 * followed; after some milliseconds it is time to settle for a deletion. */
bool store_client_is_ambiguous(const struct store_client *c);
int store_client_settle(struct store_client *c);

/* Bytes held, as they count against limits.total: the table, keys, values and
 * queued items with what the allocations keep in reserve, waits and watches, and
 * the buffers of requests that have not been served; and as they count against
 * limits.output: the buffers of output, with their reserve. Clients themselves
 * count in neither. */
size_t store_bytes(const struct store *s);
size_t store_output_bytes(const struct store *s);
