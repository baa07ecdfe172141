#pragma once

/*
 * Standard output or standard error, written without ever blocking the loop:
 * what a stopped terminal or a slow pipe does not take now waits here.
 */

#include <stdbool.h>

#include "base/buf.h"

struct err;
struct loop;

struct sink {
	int fd;
	struct watch *watch; /* NULL: a file, which takes everything at once */
	struct buf backlog;
	bool given_up;
	int error; /* why nothing is written any more: EPIPE, EIO, ENOSPC, ... */
	void (*on_change)(void *data); /* the backlog shrank, or an error came up */
	void *data;
};

int sink_init(struct sink *s, struct loop *loop, int fd, void (*on_change)(void *data),
	      void *data, struct err *err);
void sink_fini(struct sink *s);

void sink_write(struct sink *s, const void *bytes, size_t len);

/* From now on, what is not taken at once is dropped, and so is what waits. */
void sink_give_up(struct sink *s);
