#pragma once

/*
 * A link carries messages both ways, in order: over a stream socket, or in
 * memory between two ends in one process. Both kinds run the same frames
 * through the same code; a handler is never called from within link_send().
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rendezvous/messages.h"

struct err;
struct link;
struct loop;

struct link_ops {
	/* One message. Slices in @msg live until the handler returns. */
	void (*on_message)(void *data, unsigned type, const union message_any *msg);
	/* The other side closed (@reason NULL) or broke the protocol. Last call. */
	void (*on_end)(void *data, const char *reason);
	/* The backlog fell to nothing after it had been more. May be NULL. */
	void (*on_drained)(void *data);
};

/* Over the connected stream socket @fd, which the link owns from now on. */
int link_new(struct link **ret, struct loop *loop, int fd, struct err *err);

/* Two ends in memory. They are freed outside handlers. */
int link_new_pair(struct link **ret_a, struct link **ret_b, struct loop *loop,
		  struct err *err);

/* Messages wait until the handler is set. */
void link_set_handler(struct link *l, const struct link_ops *ops, void *data);

struct link *link_free(struct link *l);

/* Queue one message and send what goes out at once. 0, or -ENOMEM, -EMSGSIZE,
 * -EPIPE when the other side is gone. */
int link_send(struct link *l, unsigned type, const void *msg);

/* Bytes queued and not yet taken by the other side. */
size_t link_backlog(const struct link *l);

/* Stop or resume taking messages from the socket, so that the other side's wait. */
void link_hold(struct link *l, bool on);
