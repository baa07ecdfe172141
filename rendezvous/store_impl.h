#pragma once

/*
 * Between the two halves of the store: store.c cuts the stream of bytes into
 * requests, store_ops.c carries them out. Nobody else includes this.
 */

#include <endian.h>
#include <string.h>

#include "rendezvous/keyspace.h"
#include "rendezvous/store.h"

#define VALIDATE_MAGIC 0x3C85F7CEu

/* Numbered as in the current dialect, then those that only old ones have. */
enum op {
	OP_VALIDATE,
	OP_SET,
	OP_COMPARE_SET,
	OP_GET,
	OP_ADD,
	OP_CHECK,
	OP_WAIT,
	OP_GETNUMKEYS,
	OP_DELETE_KEY,
	OP_APPEND,
	OP_MULTI_GET,
	OP_MULTI_SET,
	OP_CANCEL_WAIT,
	OP_PING,
	OP_QUEUE_PUSH,
	OP_QUEUE_POP,
	OP_QUEUE_LEN,
	OP_LIST_KEYS,
	OP_BARRIER,
	N_CURRENT_OPS,
	OP_WATCH_KEY = N_CURRENT_OPS,
	OP_WATCH_OR_DELETE,
	OP_DELETE_OR_APPEND,
	N_OPS,
};

enum dialect {
	UNKNOWN,
	CURRENT, /* 2.2 and later */
	OLD,     /* any before */
	OLD_20,  /* 1.13 or 2.0 */
	OLD_21,
};

/* A request while it arrives: @at bytes of it have been understood. */
struct request {
	const char *fields; /* kinds of the operands still to come; NULL: no opcode yet */
	size_t at;
	uint64_t left;   /* items of the list being read, then of it being answered */
	size_t answered; /* bytes of operands for which the reply is given */
	bool in_list;
	uint8_t op;
};

struct store_client {
	struct store *store;
	struct buf in, out;
	struct request req;
	struct wait *waits, *watches;
	size_t n_waits, n_watches; /* keys in them */
	size_t earlier;            /* output from before the reply being given */
	on_store_output_fn *on_output;
	void *data;
	int failed;
	enum dialect dialect;
	bool has_asked; /* anything but WATCH_KEY */
	bool ambiguous;
	bool held;
};

struct store {
	struct store_limits limits;
	struct keyspace keys;
	struct store_client *current; /* whose request is being served */
	size_t input_bytes, output_bytes, wait_bytes;
	size_t n_waits;
};

bool store_has_room(const struct store *s, size_t len);

/* Operands: k key, v value, i 8-byte integer, n 4-byte integer, K list of keys,
 * P list of (key, value). run() gets all of them, complete and within the limits
 * of their sizes; a negative result closes the connection, and REPLY_CUT asks to
 * be called again when the output was sent. */
enum { REPLY_CUT = 1 };
struct op_row {
	const char *fields;
	int (*run)(struct store_client *c, const uint8_t *at);
};
extern const struct op_row store_ops[N_OPS];

/* Forget what a client waits for. What it watches is not touched, nor looked at:
 * old clients get here with each request. */
void store_cancel_waits(struct store_client *c);
void store_cancel_watches(struct store_client *c);

static inline uint64_t take_u64(const uint8_t **at)
{
	uint64_t v;

	memcpy(&v, *at, sizeof(v));
	*at += sizeof(v);
	return le64toh(v);
}
