#pragma once

/*
 * The keys of the store: a hash table whose hash is keyed with a secret seed, so
 * that nobody can choose keys that collide. A key lives as long as it has a
 * value, a queued item or somebody on one of its lists. What the lists mean is
 * the business of store.c; nothing here knows of clients.
 */

#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"

struct waiter;

/* Who waits for a key, oldest first. */
struct wait_list {
	struct waiter *first, *last;
};

enum wait_kind {
	WAIT_KEYS,    /* until the key is there */
	WAIT_BARRIER, /* until enough have arrived */
	WAIT_WATCH,   /* for ever: told of each change */
	N_WAIT_KINDS,
};

struct item {
	struct item *next;
	uint32_t len;
	uint8_t data[];
};

struct key {
	struct key *next; /* in its bucket */
	uint64_t hash;
	uint8_t *value;
	uint32_t value_len, value_cap;
	uint32_t n_items;
	uint32_t name_len;
	struct item *first_item, *last_item;
	struct wait_list waits[N_WAIT_KINDS];
	bool has_value;
	uint8_t name[];
};

struct keyspace {
	struct key **buckets, **old; /* @old empties into @buckets bit by bit */
	size_t n_buckets, n_old, moved;
	size_t n_keys;   /* of any kind */
	size_t n_values; /* with a value */
	size_t n_items;  /* in all queues */
	size_t bytes;    /* what all of it holds */
	uint64_t seed[2];
};

void keyspace_init(struct keyspace *ks, const uint8_t seed[16]);
void keyspace_fini(struct keyspace *ks); /* the lists must be empty */

struct key *keyspace_find(struct keyspace *ks, struct slice name);
/* Find or create. NULL when memory is short. */
struct key *keyspace_get(struct keyspace *ks, struct slice name);
/* Forget a key that nothing keeps alive any more; any other key is left. */
void keyspace_release(struct keyspace *ks, struct key *k);

/* Call @fn for every key; it must not add or remove any. */
typedef void keyspace_visit_fn(void *data, const struct key *k);
void keyspace_visit(struct keyspace *ks, keyspace_visit_fn *fn, void *data);

static inline bool key_is_present(const struct key *k)
{
	return k->has_value || k->n_items;
}

static inline struct slice key_name(const struct key *k)
{
	return (struct slice){ k->name, k->name_len };
}

static inline struct slice key_value(const struct key *k)
{
	return (struct slice){ k->value, k->value_len };
}

/* Return 0, or -ENOMEM with the key as it was. */
int key_assign(struct keyspace *ks, struct key *k, struct slice value);
int key_append(struct keyspace *ks, struct key *k, struct slice more);
int key_push(struct keyspace *ks, struct key *k, struct slice data);

void key_clear(struct keyspace *ks, struct key *k); /* the value only */
void key_pop(struct keyspace *ks, struct key *k);   /* drops the oldest item */
