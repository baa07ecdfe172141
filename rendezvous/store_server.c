/*
 * The store's sockets. Requests are answered at once where the socket takes the
 * answer; a socket that does not is watched until it does, and no further
 * request is read from it meanwhile. What a client may and may not do is decided
 * by the engine (store.h); here a client is only a descriptor.
 *
 * The loop is shared with those who supervise workers, so no client keeps it: each
 * has a burst of requests or a slice of output at a time, and who wants more stands
 * in a queue, from which a turn of the loop serves for some milliseconds.
 */

#include "rendezvous/store_server.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"
#include "rendezvous/store.h"

enum {
	ACCEPT_BATCH = 64,
	ACCEPT_PAUSE_MS = 50,
	SETTLE_MS = 20, /* see store_client_is_ambiguous() */
	INPUT_SIZE = 64 << 10,
	SLICE = 1 << 20, /* bytes sent to one client at a time */
	TURN_MS = 4,     /* of one turn of the loop, for all clients */
	PORT_TRIES = 100,
	MIN_CONNS = 16,
	MAX_CONNS = 1 << 20,
	MIN_SPARE_FDS = 64,
};

struct listener {
	struct store_server *server;
	int fd;
	struct watch *watch;
};

struct conn {
	struct store_server *server;
	struct conn *prev, *next;
	struct conn *prev_pending, *next_pending;
	struct conn *prev_ready, *next_ready;
	struct store_client *client;
	struct watch *watch;
	struct timer *settle; /* made when first needed */
	int fd;
	int events;      /* what woke it, where that must wait for another turn */
	bool is_pending; /* another client's request gave it something to do */
	bool is_ready;   /* in the queue; its descriptor is not watched meanwhile */
};

enum { IPV4, IPV6, N_FAMILIES };

struct store_server {
	struct loop *loop;
	struct store *store;
	struct listener listeners[N_FAMILIES];
	struct timer *accept_again;
	struct prelude *prelude;
	struct conn *conns, *pending;
	struct conn *first_ready, *last_ready;
	uint64_t turn_end_ms; /* 0: no client had anything yet */
	size_t n_conns, max_conns;
	uint16_t port;
	uint8_t input[INPUT_SIZE]; /* what one recv brought; nothing stays in it */
};

DEFINE_OWN(server, struct store_server, store_server_free)

static void pending_add(struct conn *c)
{
	struct store_server *s = c->server;

	if (c->is_pending)
		return;
	c->is_pending = true;
	c->prev_pending = NULL;
	c->next_pending = s->pending;
	if (s->pending)
		s->pending->prev_pending = c;
	s->pending = c;
}

static void pending_remove(struct conn *c)
{
	if (!c->is_pending)
		return;
	c->is_pending = false;
	if (c->prev_pending)
		c->prev_pending->next_pending = c->next_pending;
	else
		c->server->pending = c->next_pending;
	if (c->next_pending)
		c->next_pending->prev_pending = c->prev_pending;
}

static void ready_add(struct conn *c)
{
	struct store_server *s = c->server;

	if (c->is_ready)
		return;
	c->is_ready = true;
	c->prev_ready = s->last_ready;
	c->next_ready = NULL;
	if (s->last_ready)
		s->last_ready->next_ready = c;
	else
		s->first_ready = c;
	s->last_ready = c;
}

static void ready_remove(struct conn *c)
{
	struct store_server *s = c->server;

	if (!c->is_ready)
		return;
	c->is_ready = false;
	c->events = 0;
	if (c->prev_ready)
		c->prev_ready->next_ready = c->next_ready;
	else
		s->first_ready = c->next_ready;
	if (c->next_ready)
		c->next_ready->prev_ready = c->prev_ready;
	else
		s->last_ready = c->prev_ready;
}

static bool turn_is_over(struct store_server *s)
{
	uint64_t now = now_ms();

	if (!s->turn_end_ms)
		s->turn_end_ms = now + TURN_MS;
	return now >= s->turn_end_ms;
}

/* Also for one that conn_new() has only half made, which is in no list yet. */
static struct conn *conn_free(struct conn *c)
{
	struct store_server *s = c->server;

	pending_remove(c);
	ready_remove(c);
	if (c->prev)
		c->prev->next = c->next;
	else if (s->conns == c)
		s->conns = c->next;
	if (c->next)
		c->next->prev = c->prev;
	s->n_conns--;
	(void)watch_free(c->watch);
	(void)timer_free(c->settle);
	own_close(&c->fd);
	(void)store_client_free(c->client);
	free(c);
	return NULL;
}

enum { ALL_SENT, SOCKET_FULL, SLICE_SENT };

/* As much as the socket takes, up to a slice. Returns which of these it was. */
static int conn_send(struct conn *c)
{
	size_t left = SLICE;

	for (;;) {
		struct slice out = store_client_output(c->client);
		size_t len = out.len < left ? out.len : left;
		ssize_t n;

		if (!len)
			return out.len ? SLICE_SENT : ALL_SENT;
		n = send(c->fd, out.data, len, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN ? SOCKET_FULL : -errno;
		store_client_sent(c->client, (size_t)n);
		left -= (size_t)n;
	}
}

/* One read at a time, so that a client that talks without end lets others have
 * theirs. */
static int conn_receive(struct conn *c)
{
	struct store_server *s = c->server;
	ssize_t n = recv(c->fd, s->input, sizeof(s->input), 0);

	if (n > 0)
		return store_client_feed(c->client, s->input, (size_t)n);
	if (n == 0)
		return -EPIPE;
	return errno == EAGAIN || errno == EINTR ? 0 : -errno;
}

static void conn_finish(struct conn *c, int r);

static void on_settle(void *data)
{
	struct conn *c = data;

	conn_finish(c, store_client_settle(c->client));
}

/* Each further byte that leaves the client's meaning open starts the time anew. */
static int conn_arm_settle(struct conn *c)
{
	int r = 0;

	if (!store_client_is_ambiguous(c->client)) {
		if (c->settle)
			timer_stop(c->settle);
		return 0;
	}
	if (!c->settle)
		r = timer_new(&c->settle, c->server->loop, on_settle, c, NULL);
	if (r == 0)
		timer_start(c->settle, SETTLE_MS);
	return r;
}

/* Send what came of the last step, @r, and wait for what comes next; or close. */
static void conn_update(struct conn *c, int r)
{
	int events = 0, sent = 0;

	if (r == 0)
		r = sent = conn_send(c);
	if (r >= 0)
		r = conn_arm_settle(c);
	if (r < 0) {
		(void)conn_free(c);
		return;
	}
	if (sent == SLICE_SENT ||
	    (store_client_is_held(c->client) && !store_client_is_paused(c->client))) {
		ready_add(c);
		watch_set(c->watch, 0);
		return;
	}
	ready_remove(c);
	if (!store_client_is_paused(c->client))
		events |= WATCH_READ;
	if (sent == SOCKET_FULL)
		events |= WATCH_WRITE;
	/* Also where nothing changed: after an error it starts watching again, for the
	 * bytes that came before the error were read first. */
	watch_set(c->watch, events);
}

/* As conn_update(), and the same for those whom this client's requests woke. */
static void conn_finish(struct conn *c, int r)
{
	struct store_server *s = c->server;

	conn_update(c, r);
	while (s->pending) {
		c = s->pending;
		pending_remove(c);
		conn_update(c, store_client_feed(c->client, NULL, 0));
	}
}

/* From inside the engine, which must not be called from here: later, then. */
static void on_output(void *data)
{
	pending_add(data);
}

/* Do one thing for a client: serve what it was held back with, or what it sends. */
static void conn_serve(struct conn *c, int events)
{
	bool is_paused = store_client_is_paused(c->client);
	int r = 0;

	/* Reading was not asked for: it is how an error is reported. */
	if (is_paused && events == WATCH_READ)
		r = -EPIPE;
	else if (!is_paused && store_client_is_held(c->client))
		r = store_client_feed(c->client, NULL, 0);
	else if (!is_paused && events & WATCH_READ)
		r = conn_receive(c);
	conn_finish(c, r);
}

static void on_conn(void *data, int events)
{
	struct conn *c = data;

	if (!turn_is_over(c->server)) {
		conn_serve(c, events);
		return;
	}
	c->events = events;
	ready_add(c);
	watch_set(c->watch, 0);
}

/* Before the loop waits: a new turn, which those in the queue have first. */
static void on_turn(void *data)
{
	struct store_server *s = data;

	s->turn_end_ms = 0;
	while (s->first_ready && !turn_is_over(s)) {
		struct conn *c = s->first_ready;
		int events = c->events;

		ready_remove(c);
		conn_serve(c, events);
	}
	if (s->first_ready)
		prelude_again(s->prelude);
	else
		s->turn_end_ms = 0;
}

/* Takes over @fd, also when it fails. */
static int conn_new(struct store_server *s, int fd)
{
	struct conn *c = calloc(1, sizeof(*c));
	int one = 1, r;

	if (!c) {
		own_close(&fd);
		return -ENOMEM;
	}
	c->server = s;
	c->fd = fd;
	s->n_conns++;
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	r = store_client_new(&c->client, s->store, on_output, c, NULL);
	if (r == 0)
		r = watch_new(&c->watch, s->loop, fd, WATCH_READ, on_conn, c, NULL);
	if (r < 0) {
		(void)conn_free(c);
		return r;
	}
	c->next = s->conns;
	if (c->next)
		c->next->prev = c;
	s->conns = c;
	return 0;
}

/* @events WATCH_READ: accept; 0: leave connections in the backlog. */
static void accept_watch(struct store_server *s, int events)
{
	for (int i = 0; i < N_FAMILIES; i++)
		if (s->listeners[i].watch)
			watch_set(s->listeners[i].watch, events);
}

static void on_accept_again(void *data)
{
	accept_watch(data, WATCH_READ);
}

static void on_accept(void *data, int events)
{
	struct listener *l = data;
	struct store_server *s = l->server;

	(void)events;
	for (int i = 0; i < ACCEPT_BATCH; i++) {
		int fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

		if (fd < 0 && errno == EAGAIN)
			return;
		if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
			continue;
		if (fd < 0) {
			/* Out of descriptors or memory. The connection stays in the
			 * backlog and would wake us again at once, so look away. */
			accept_watch(s, 0);
			timer_start(s->accept_again, ACCEPT_PAUSE_MS);
			return;
		}
		/* A refusal is an answer; a backlog would be silence. */
		if (s->n_conns >= s->max_conns)
			own_close(&fd);
		else
			(void)conn_new(s, fd);
	}
}

/* Leave a part of the descriptors to whatever else this process does. */
static size_t max_conns(void)
{
	struct rlimit lim;
	size_t n, spare;

	if (getrlimit(RLIMIT_NOFILE, &lim) < 0 || lim.rlim_cur > MAX_CONNS)
		return MAX_CONNS;
	n = lim.rlim_cur;
	spare = n / 4 > MIN_SPARE_FDS ? n / 4 : MIN_SPARE_FDS;
	return n > spare + MIN_CONNS ? n - spare : MIN_CONNS;
}

union address {
	struct sockaddr any;
	struct sockaddr_in in;
	struct sockaddr_in6 in6;
};

static socklen_t loopback(union address *a, int family, uint16_t port)
{
	memset(a, 0, sizeof(*a));
	if (family == IPV4) {
		a->in.sin_family = AF_INET;
		a->in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		a->in.sin_port = htons(port);
		return sizeof(a->in);
	}
	a->in6.sin6_family = AF_INET6;
	a->in6.sin6_addr = in6addr_loopback;
	a->in6.sin6_port = htons(port);
	return sizeof(a->in6);
}

static uint16_t bound_port(int fd)
{
	union address a = { 0 };
	socklen_t len = sizeof(a);

	(void)getsockname(fd, &a.any, &len);
	return ntohs(a.any.sa_family == AF_INET ? a.in.sin_port : a.in6.sin6_port);
}

/* Listen on one loopback address. *@ret stays -1 where this machine has none. */
static int listen_on(int *ret, int family, uint16_t port, struct err *err)
{
	const char *name = family == IPV4 ? "127.0.0.1" : "[::1]";
	int domain = family == IPV4 ? AF_INET : AF_INET6, one = 1;
	OWN_FD int fd = socket(domain, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	union address a;
	socklen_t len = loopback(&a, family, port);

	if (fd < 0 && errno == EAFNOSUPPORT)
		return 0;
	if (fd < 0)
		return err_sys(err, "socket");
	(void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (family == IPV6)
		(void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
	if (bind(fd, &a.any, len) < 0)
		return errno == EADDRNOTAVAIL
			       ? 0
			       : err_sys(err, "bind %s port %u", name, port);
	/* The kernel lowers this to the longest backlog it allows. */
	if (listen(fd, INT_MAX) < 0)
		return err_sys(err, "listen on %s port %u", name, port);
	*ret = take_fd(&fd);
	return 0;
}

/* Both addresses on one port, which the first one picks where @port is 0. */
static int listen_once(struct store_server *s, uint16_t port, struct err *err)
{
	s->port = port;
	for (int i = 0; i < N_FAMILIES; i++) {
		int *fd = &s->listeners[i].fd;
		int r = listen_on(fd, i, s->port, err);

		if (r < 0)
			return r;
		if (*fd >= 0 && !s->port)
			s->port = bound_port(*fd);
	}
	if (!s->port || (s->listeners[IPV4].fd < 0 && s->listeners[IPV6].fd < 0))
		return err_set(err, -EADDRNOTAVAIL, "no loopback address");
	return 0;
}

static int listen_all(struct store_server *s, uint16_t port, struct err *err)
{
	int r = -EADDRINUSE;

	/* A port picked on one address may be somebody's on the other. */
	for (int i = 0; i < (port ? 1 : PORT_TRIES) && r == -EADDRINUSE; i++) {
		own_close(&s->listeners[IPV4].fd);
		own_close(&s->listeners[IPV6].fd);
		r = listen_once(s, port, err);
	}
	return r;
}

static int watch_listeners(struct store_server *s, struct err *err)
{
	for (int i = 0; i < N_FAMILIES; i++) {
		struct listener *l = &s->listeners[i];
		int r = 0;

		if (l->fd >= 0)
			r = watch_new(&l->watch, s->loop, l->fd, WATCH_READ, on_accept, l,
				      err);
		if (r < 0)
			return r;
	}
	return 0;
}

int store_server_new(struct store_server **ret, struct loop *loop, uint16_t port,
		     struct err *err)
{
	OWN(own_server) struct store_server *s = calloc(1, sizeof(*s));
	uint8_t seed[16];
	int r;

	if (!s)
		return err_set(err, -ENOMEM, "store");
	s->loop = loop;
	s->max_conns = max_conns();
	for (int i = 0; i < N_FAMILIES; i++)
		s->listeners[i] = (struct listener){ .server = s, .fd = -1 };
	if (getrandom(seed, sizeof(seed), 0) != (ssize_t)sizeof(seed))
		return err_sys(err, "random bytes");
	r = store_new(&s->store, NULL, seed, err);
	if (r == 0)
		r = prelude_new(&s->prelude, loop, on_turn, s, err);
	if (r == 0)
		r = timer_new(&s->accept_again, loop, on_accept_again, s, err);
	if (r == 0)
		r = listen_all(s, port, err);
	if (r == 0)
		r = watch_listeners(s, err);
	if (r < 0)
		return err_wrap(err, r, "key-value store");
	*ret = take(s);
	return 0;
}

struct store_server *store_server_free(struct store_server *s)
{
	if (!s)
		return NULL;
	for (int i = 0; i < N_FAMILIES; i++) {
		(void)watch_free(s->listeners[i].watch);
		own_close(&s->listeners[i].fd);
	}
	(void)timer_free(s->accept_again);
	(void)prelude_free(s->prelude);
	while (s->conns)
		(void)conn_free(s->conns);
	(void)store_free(s->store);
	free(s);
	return NULL;
}

uint16_t store_server_port(const struct store_server *s)
{
	return s->port;
}
