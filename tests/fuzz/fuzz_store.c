/*
 * The store's engine under several clients at once. The first byte chooses how
 * the clients start; then come records: a byte that names the client and what to
 * do, a length, and that many bytes for it. Limits are small, so that they are met.
 */

#include <stdint.h>
#include <stdlib.h>

#include "rendezvous/store.h"

enum { N_CLIENTS = 4 };

static const struct store_limits limits = {
	.key = 64,
	.value = 4096,
	.list = 64,
	.request = 8192,
	.reply = 16384,
	.backlog = 512,
	.burst = 8,
	.total = 64 << 10,
	.output = 24 << 10,
	.keys = 32,
	.items = 32,
	.client_waits = 48,
	.watches = 24,
	.waits = 96,
};

static const uint8_t validate[] = { 0, 0xCE, 0xF7, 0x85, 0x3C };

static void on_output(void *data)
{
	++*(int *)data;
}

static void restart(struct store_client **c, struct store *s, int *told)
{
	*c = store_client_free(*c);
	if (store_client_new(c, s, on_output, told, NULL) < 0)
		abort();
}

/* Read some of what the client was sent. */
static void drain(struct store_client *c, size_t len)
{
	size_t n = store_client_output(c).len;

	store_client_sent(c, n < len ? n : len);
}

static void feed(struct store_client *c, const uint8_t *data, size_t len, int one_by_one)
{
	size_t step = one_by_one ? 1 : len;

	for (size_t i = 0; i < len && !store_client_is_paused(c); i += step) {
		/* An exact copy, so that a sanitizer sees one byte too far. */
		uint8_t *copy = malloc(step);

		if (!copy)
			abort();
		for (size_t j = 0; j < step; j++)
			copy[j] = data[i + j];
		(void)store_client_feed(c, copy, step);
		free(copy);
	}
}

/* A client that is held back has requests to be served once its output is read. */
static int has_progress(struct store_client *c)
{
	for (int i = 0; i < 100000 && store_client_is_held(c); i++) {
		drain(c, SIZE_MAX);
		if (store_client_feed(c, NULL, 0) < 0)
			return 1;
	}
	return !store_client_is_held(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const uint8_t seed[16] = "not so random";
	struct store_client *clients[N_CLIENTS] = { 0 };
	struct store *s = NULL;
	int told[N_CLIENTS] = { 0 };
	uint8_t start = size ? data[0] : 0;

	if (store_new(&s, &limits, seed, NULL) < 0)
		abort();
	for (int i = 0; i < N_CLIENTS; i++) {
		restart(&clients[i], s, &told[i]);
		if (start >> i & 1)
			feed(clients[i], validate, sizeof(validate), 0);
	}
	for (size_t at = 1; at + 2 <= size;) {
		uint8_t what = data[at], i = what % N_CLIENTS;
		size_t len = data[at + 1];

		at += 2;
		len = len < size - at ? len : size - at;
		switch (what / N_CLIENTS % 8) {
		case 0:
			drain(clients[i], len * 8);
			(void)store_client_feed(clients[i], NULL, 0);
			break;
		case 1:
			restart(&clients[i], s, &told[i]);
			if (start >> i & 1)
				feed(clients[i], validate, sizeof(validate), 0);
			break;
		case 2:
			(void)store_client_settle(clients[i]);
			break;
		case 3:
			feed(clients[i], data + at, len, 1);
			at += len;
			break;
		default:
			feed(clients[i], data + at, len, 0);
			at += len;
		}
		/* Buffers may be up to twice what is in them, and small replies are
		 * given beyond the limit. */
		if (store_bytes(s) > 4 * limits.total ||
		    store_output_bytes(s) >
			    4 * (limits.output + N_CLIENTS * limits.backlog))
			abort();
	}
	for (int i = 0; i < N_CLIENTS; i++) {
		if (!has_progress(clients[i]))
			abort();
		(void)store_client_free(clients[i]);
	}
	(void)store_free(s);
	return 0;
}
