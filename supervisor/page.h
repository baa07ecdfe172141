#pragma once

/*
 * The control page of a worker: a sealed memfd that the supervisor and the
 * runtime in the worker share. It has no name, so nothing of it can be left
 * behind. Fields are only ever appended; both sides check magic, version and
 * size before they use one.
 */

#include <stdint.h>

struct err;

#define PAGE_MAGIC UINT64_C(0x4147506c65636361) /* "accelPGA" */

enum { PAGE_VERSION = 1, PAGE_SIZE = 4096, NONCE_SIZE = 16 };

struct control_page {
	uint64_t magic;
	uint32_t version, size;
	uint8_t nonce[NONCE_SIZE]; /* the same on all pages of a job */
	uint32_t rank, attempt;
	uint32_t owner; /* pid of the process that claimed the rank; 0: nobody yet */
};

/* Make one. Returns the descriptor (CLOEXEC) and its inode. */
int page_new(int *ret_fd, uint64_t *ret_inode, const uint8_t *nonce, uint32_t rank,
	     uint32_t attempt, struct err *err);
