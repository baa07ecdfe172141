#pragma once

/*
 * The key-value store on its sockets: accepts the clients of PyTorch's TCPStore
 * and feeds the engine (store.h). One thread, in the caller's loop; no client,
 * however slow, makes another one wait.
 */

#include <stdint.h>

struct err;
struct loop;
struct store_server;

/* Listen on @port (0: a free one) of the loopback addresses ::1 and 127.0.0.1,
 * whichever exist. -EADDRINUSE when somebody else has @port on either. */
int store_server_new(struct store_server **ret, struct loop *loop, uint16_t port,
		     struct err *err);

/* Closes every connection, which is what makes a waiting client fail at once. */
struct store_server *store_server_free(struct store_server *s);

uint16_t store_server_port(const struct store_server *s);
