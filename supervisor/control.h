#pragma once

/*
 * The control socket of a job: a SOCK_SEQPACKET path in a private folder. Any
 * process of the same user may ask what the job is doing, and a worker gets the
 * descriptor of its control page there when the inherited one was lost on the
 * way. One frame per packet.
 */

#include "rendezvous/messages.h"

struct control;
struct err;
struct loop;

struct control_ops {
	/* Fill in the answer; -errno leaves the question unanswered. */
	int (*on_status)(void *data, struct msg_status *ret);
	/* The descriptor of that rank's page, still owned by the callee, or -errno. */
	int (*on_page)(void *data, uint32_t rank);
};

int control_new(struct control **ret, struct loop *loop, const char *path,
		const struct control_ops *ops, void *data, struct err *err);

/* Closes the connections and removes the socket's file. */
struct control *control_free(struct control *c);

/* Remove the socket of a job whose supervisor is no more, whatever it had come to. */
void control_remove(const char *path);
