#pragma once

/*
 * The control socket of a job: a SOCK_SEQPACKET path in a private folder. Any
 * process of the same user may ask what the job is doing, and a worker gets the
 * descriptors of its control page and of the ring there when the inherited ones
 * were lost on the way. One frame per packet.
 *
 * The same is to be had under the abstract name "\0PATH", for workers in a mount
 * namespace that hides the folder. Anybody may take an abstract name, so whoever
 * connects to it looks at the peer's uid.
 */

#include "rendezvous/messages.h"

struct control;
struct err;
struct loop;

enum { PAGE_FDS = 2 };

struct control_ops {
	/* Fill in the answer; -errno leaves the question unanswered. */
	int (*on_status)(void *data, struct msg_status *ret);
	/* That rank's control page, and the ring or -1; both still owned by the
	 * callee. 0, or -errno where there is no such page. */
	int (*on_page)(void *data, uint32_t rank, int fds[PAGE_FDS]);
};

int control_new(struct control **ret, struct loop *loop, const char *path,
		const struct control_ops *ops, void *data, struct err *err);

/* Closes the connections and both sockets, and removes the path. */
struct control *control_free(struct control *c);

/* Remove the socket of a job whose supervisor is no more, whatever it had come to. */
void control_remove(const char *path);
