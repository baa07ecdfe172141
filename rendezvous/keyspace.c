/*
 * The table grows by doubling, and old buckets move over a few at a time, so
 * that no single request pays for all of them. It never shrinks: a keyspace
 * lasts one attempt of a job.
 */

#include "rendezvous/keyspace.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
	FIRST_BUCKETS = 64,
	MOVE_BUCKETS = 4, /* per new key; 2 would be enough to be done in time */
	KEEP_CAP = 256,   /* a value's memory is kept for a smaller one up to here */
};

static inline uint64_t rotl(uint64_t x, int by)
{
	return x << by | x >> (64 - by);
}

static inline void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[2] += v[3];
	v[1] = rotl(v[1], 13) ^ v[0];
	v[3] = rotl(v[3], 16) ^ v[2];
	v[0] = rotl(v[0], 32);
	v[2] += v[1];
	v[0] += v[3];
	v[1] = rotl(v[1], 17) ^ v[2];
	v[3] = rotl(v[3], 21) ^ v[0];
	v[2] = rotl(v[2], 32);
}

/* SipHash-1-3 (Aumasson and Bernstein). */
static uint64_t sip_hash(const uint64_t seed[2], struct slice in)
{
	uint64_t v[4] = { seed[0] ^ 0x736f6d6570736575, seed[1] ^ 0x646f72616e646f6d,
			  seed[0] ^ 0x6c7967656e657261, seed[1] ^ 0x7465646279746573 };
	uint64_t last = (uint64_t)in.len << 56, word;
	size_t i = 0;

	for (; i + 8 <= in.len; i += 8) {
		memcpy(&word, in.data + i, 8);
		word = le64toh(word);
		v[3] ^= word;
		sip_round(v);
		v[0] ^= word;
	}
	for (size_t j = 0; i + j < in.len; j++)
		last |= (uint64_t)in.data[i + j] << (8 * j);
	v[3] ^= last;
	sip_round(v);
	v[0] ^= last;
	v[2] ^= 0xff;
	for (int j = 0; j < 3; j++)
		sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static size_t key_size(const struct key *k)
{
	return sizeof(*k) + k->name_len + k->value_cap;
}

static void key_free(struct keyspace *ks, struct key *k)
{
	key_clear(ks, k);
	while (k->n_items)
		key_pop(ks, k);
	ks->bytes -= key_size(k);
	ks->n_keys--;
	free(k->value);
	free(k);
}

static void free_chains(struct keyspace *ks, struct key **buckets, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		while (buckets[i]) {
			struct key *k = buckets[i];

			buckets[i] = k->next;
			key_free(ks, k);
		}
	}
	free(buckets);
}

/* Move the next few old buckets over. */
static void move_some(struct keyspace *ks, size_t n)
{
	for (; n && ks->moved < ks->n_old; n--, ks->moved++) {
		struct key *k = ks->old[ks->moved];

		ks->old[ks->moved] = NULL;
		while (k) {
			struct key *next = k->next;
			struct key **at = &ks->buckets[k->hash & (ks->n_buckets - 1)];

			k->next = *at;
			*at = k;
			k = next;
		}
	}
	if (ks->old && ks->moved == ks->n_old) {
		free(ks->old);
		ks->old = NULL;
		ks->n_old = 0;
	}
}

/* A table that cannot grow still works, only slower. */
static void grow(struct keyspace *ks)
{
	size_t n = ks->n_buckets ? ks->n_buckets * 2 : FIRST_BUCKETS;
	struct key **buckets = calloc(n, sizeof(struct key *));

	if (!buckets)
		return;
	move_some(ks, ks->n_old);
	ks->bytes += (n - ks->n_buckets) * sizeof(struct key *);
	ks->old = ks->buckets;
	ks->n_old = ks->n_buckets;
	ks->moved = 0;
	ks->buckets = buckets;
	ks->n_buckets = n;
	move_some(ks, 0);
}

static struct key **find_in(struct key **buckets, size_t n, uint64_t hash,
			    struct slice name)
{
	struct key **at = n ? &buckets[hash & (n - 1)] : NULL;

	for (; at && *at; at = &(*at)->next)
		if ((*at)->hash == hash && slice_eq(key_name(*at), name))
			return at;
	return NULL;
}

/* The pointer that leads to the key, for those who take it out; or NULL. */
static struct key **find_slot(struct keyspace *ks, uint64_t hash, struct slice name)
{
	struct key **at = find_in(ks->buckets, ks->n_buckets, hash, name);

	return at ? at : find_in(ks->old, ks->n_old, hash, name);
}

/* Make room for @cap bytes of value, keeping what is there. */
static int reserve_value(struct keyspace *ks, struct key *k, size_t cap)
{
	uint8_t *mem = realloc(k->value, cap ? cap : 1);

	if (!mem)
		return -ENOMEM;
	ks->bytes += cap - k->value_cap;
	k->value = mem;
	k->value_cap = (uint32_t)cap;
	return 0;
}

static void mark_valued(struct keyspace *ks, struct key *k)
{
	ks->n_values += !k->has_value;
	k->has_value = true;
}

void keyspace_init(struct keyspace *ks, const uint8_t seed[16])
{
	*ks = (struct keyspace){ 0 };
	memcpy(ks->seed, seed, sizeof(ks->seed));
}

void keyspace_fini(struct keyspace *ks)
{
	free_chains(ks, ks->buckets, ks->n_buckets);
	free_chains(ks, ks->old, ks->n_old);
	*ks = (struct keyspace){ 0 };
}

struct key *keyspace_find(struct keyspace *ks, struct slice name)
{
	struct key **at = find_slot(ks, sip_hash(ks->seed, name), name);

	return at ? *at : NULL;
}

struct key *keyspace_get(struct keyspace *ks, struct slice name)
{
	uint64_t hash = sip_hash(ks->seed, name);
	struct key **at = find_slot(ks, hash, name), *k;

	if (at)
		return *at;
	if (ks->n_keys >= ks->n_buckets)
		grow(ks);
	if (!ks->n_buckets)
		return NULL;
	move_some(ks, MOVE_BUCKETS);

	k = calloc(1, sizeof(*k) + name.len);
	if (!k)
		return NULL;
	k->hash = hash;
	k->name_len = (uint32_t)name.len;
	if (name.len)
		memcpy(k->name, name.data, name.len);
	at = &ks->buckets[hash & (ks->n_buckets - 1)];
	k->next = *at;
	*at = k;
	ks->n_keys++;
	ks->bytes += key_size(k);
	return k;
}

void keyspace_release(struct keyspace *ks, struct key *k)
{
	struct key **at;

	if (key_is_present(k))
		return;
	for (int i = 0; i < N_WAIT_KINDS; i++)
		if (k->waits[i].first)
			return;
	at = find_slot(ks, k->hash, key_name(k));
	*at = k->next;
	key_free(ks, k);
}

static void visit_chains(struct key **buckets, size_t n, keyspace_visit_fn *fn,
			 void *data)
{
	for (size_t i = 0; i < n; i++)
		for (const struct key *k = buckets[i]; k; k = k->next)
			fn(data, k);
}

void keyspace_visit(struct keyspace *ks, keyspace_visit_fn *fn, void *data)
{
	visit_chains(ks->buckets, ks->n_buckets, fn, data);
	visit_chains(ks->old, ks->n_old, fn, data);
}

int key_assign(struct keyspace *ks, struct key *k, struct slice value)
{
	bool wasteful = k->value_cap > KEEP_CAP && value.len < k->value_cap / 2;

	if (value.len > UINT32_MAX)
		return -ENOMEM;
	if (!k->value || value.len > k->value_cap || wasteful) {
		int r = reserve_value(ks, k, value.len);

		if (r < 0)
			return r;
	}
	if (value.len)
		memcpy(k->value, value.data, value.len);
	k->value_len = (uint32_t)value.len;
	mark_valued(ks, k);
	return 0;
}

int key_append(struct keyspace *ks, struct key *k, struct slice more)
{
	size_t len = k->value_len + more.len;

	if (len > UINT32_MAX / 2)
		return -ENOMEM;
	if (!k->value || len > k->value_cap) {
		/* By halves, so that many small pieces cost one copy or two each. */
		int r = reserve_value(ks, k, k->value ? len + len / 2 : len);

		if (r < 0)
			return r;
	}
	if (more.len)
		memcpy(k->value + k->value_len, more.data, more.len);
	k->value_len = (uint32_t)len;
	mark_valued(ks, k);
	return 0;
}

void key_clear(struct keyspace *ks, struct key *k)
{
	ks->n_values -= k->has_value;
	ks->bytes -= k->value_cap;
	free(k->value);
	k->value = NULL;
	k->value_len = k->value_cap = 0;
	k->has_value = false;
}

int key_push(struct keyspace *ks, struct key *k, struct slice data)
{
	struct item *it = malloc(sizeof(*it) + data.len);

	if (!it)
		return -ENOMEM;
	it->next = NULL;
	it->len = (uint32_t)data.len;
	if (data.len)
		memcpy(it->data, data.data, data.len);
	if (k->last_item)
		k->last_item->next = it;
	else
		k->first_item = it;
	k->last_item = it;
	k->n_items++;
	ks->n_items++;
	ks->bytes += sizeof(*it) + data.len;
	return 0;
}

void key_pop(struct keyspace *ks, struct key *k)
{
	struct item *it = k->first_item;

	k->first_item = it->next;
	if (!k->first_item)
		k->last_item = NULL;
	k->n_items--;
	ks->n_items--;
	ks->bytes -= sizeof(*it) + it->len;
	free(it);
}
