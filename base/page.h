#pragma once

/*
 * What the supervisor and the runtime in the workers share: sealed memfds
 * without a name, so nothing of them can be left behind.
 *
 * The control page belongs to one worker. The ring belongs to the workers of a
 * node and carries their collectives. Fields are only ever appended; both sides
 * check magic, version and size before they use one. Words that several
 * processes write are accessed atomically.
 */

#include <stddef.h>
#include <stdint.h>

struct err;

#define PAGE_MAGIC UINT64_C(0x4147506c65636361) /* "accelPGA" */
#define RING_MAGIC UINT64_C(0x474e526c65636361) /* "accelRNG" */

enum {
	PAGE_VERSION = 1,
	PAGE_SIZE = 4096,
	RING_VERSION = 1,
	NONCE_SIZE = 16,
	CACHE_LINE = 64,
};

struct control_page {
	uint64_t magic;
	uint32_t version, size;
	uint8_t nonce[NONCE_SIZE]; /* the same on all pages of a job */
	uint32_t rank, attempt;
	uint32_t owner; /* pid of the process that claimed the rank; 0: nobody yet */

	/* Written before the worker starts. */
	uint32_t n_cores; /* cores of the node for its workers together; 0: not known */
	int32_t ring_fd;  /* number of the ring's descriptor in the worker, or -1 */
	uint32_t reserved;
	uint64_t ring_inode;

	/* Written by the supervisor: not 0 when the job is to end in order. */
	uint32_t stop;

	/* Written by the worker. */
	uint32_t state; /* enum page_state */
	uint64_t step;
};

enum page_state { PAGE_UNUSED, PAGE_JOINED, PAGE_FAILED, PAGE_FINISHED };

/*
 * The ring. Each of the n_ranks processes owns a cell (its place and what it is)
 * and n_slots slots, through which its part of a collective passes in chunks of
 * at most slot_bytes. Behind them lies room for the memory that programs ask
 * for, arena_bytes for each rank. The file is sparse: memory that nobody touches
 * costs nothing.
 */
enum {
	RING_SLOTS = 4,
	SLOT_HEAD = 256,   /* bytes before a slot's data */
	CELL_BYTES = 1024, /* runtime/world.h says what is in a cell */
	CELL_ENDED = 1016, /* but this uint32: the supervisor has seen its rank end */
	MAX_LOCAL_RANKS = 1024,
	ABORT_TEXT = 1024,
};

struct ring_page {
	uint64_t magic;
	uint32_t version, n_ranks;
	uint64_t size; /* of the file */
	uint8_t nonce[NONCE_SIZE];
	uint32_t n_slots, slot_bytes;
	uint64_t cells, slots, arenas; /* where they begin */
	uint64_t arena_bytes;          /* of one rank */

	/* The first rank that fails all others writes why: 0 nobody, 1 writing, 2
	 * written. */
	uint32_t abort_state, abort_rank;
	int32_t abort_code;
	uint32_t reserved;
	char abort_text[ABORT_TEXT];

	uint32_t chunk_bytes; /* what a reduce or broadcast puts into a slot */
	uint32_t reserved_too;
};

/*
 * How the runtime asks the control socket for the descriptors when it has not
 * inherited them: frames of the wire format whose types and fields are those of
 * MSG_PAGE_ASK and MSG_PAGE. Big-endian.
 */
enum { PAGE_ASK_TYPE = 17, PAGE_ANSWER_TYPE = 18, PAGE_WIRE_VERSION = 1 };

struct page_ask {
	uint8_t version, flags;
	uint16_t type;
	uint32_t epoch, length; /* of what follows */
	uint32_t rank;
} __attribute__((packed));

struct page_answer {
	uint8_t version, flags;
	uint16_t type;
	uint32_t epoch, length;
	int32_t error; /* errno, or 0: the control page and the ring come along */
	uint32_t rank;
} __attribute__((packed));

struct page_spec {
	const uint8_t *nonce;
	uint32_t rank, attempt, n_cores;
	int ring_fd; /* or -1 */
	uint64_t ring_inode;
};

/* Make a control page. Returns the descriptor (CLOEXEC) and its inode. */
int page_new(int *ret_fd, uint64_t *ret_inode, const struct page_spec *spec,
	     struct err *err);

/* Make the ring of @n_ranks processes. -EINVAL outside 1..MAX_LOCAL_RANKS. */
int ring_new(int *ret_fd, uint64_t *ret_inode, const uint8_t *nonce, uint32_t n_ranks,
	     struct err *err);

/* Note in the ring that a rank's process has ended, so that others do not wait for it
 * to join. 0 or -errno. */
int ring_note_ended(int fd, uint32_t local_rank);
