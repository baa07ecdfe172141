#include "rendezvous/link.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "base/err.h"
#include "base/loop.h"
#include "base/own.h"

enum { READ_SIZE = 64 << 10 };

struct link {
	int fd; /* -1 in memory */
	struct watch *watch;
	struct prelude *prelude; /* of a pair's first end: delivers for both */
	struct link *peer;
	struct buf in, out;
	const struct link_ops *ops;
	void *data;
	bool held;       /* nothing is taken in */
	bool ended;      /* nothing goes out any more */
	bool delivering; /* a handler of ours is running */
	bool freed;      /* ... and freed us */
};

static void link_end(struct link *l, const char *reason)
{
	if (l->ended)
		return;
	l->ended = true;
	l->watch = watch_free(l->watch);
	if (l->ops && l->ops->on_end)
		l->ops->on_end(l->data, reason);
}

static void deliver_frame(struct link *l, const struct frame *f)
{
	union message_any msg;
	const struct message *m = message_of(f->type);
	struct err e = { 0 };

	if (!m) {
		struct msg_unknown answer = { .type = f->type };

		(void)link_send(l, MSG_UNKNOWN, &answer);
		return;
	}
	if (wire_decode(m, f->body, &msg, &e) < 0)
		link_end(l, e.text);
	else
		l->ops->on_message(l->data, f->type, &msg);
}

/*
 * Hand over every whole frame that has arrived. Returns whether there was one.
 * A handler may free the link, or send on it, which in memory may append to the
 * very buffer its message points into; so the buffer is set aside meanwhile.
 */
static bool deliver(struct link *l)
{
	struct buf in = l->in;
	struct frame f;
	struct err e = { 0 };
	bool any = false;
	int r = 0;

	if (!l->ops || l->delivering || !buf_len(&in))
		return false;
	l->in = (struct buf){ 0 };
	l->delivering = true;
	while (!l->freed && !l->ended && (r = frame_decode(buf_slice(&in), &f, &e)) > 0) {
		deliver_frame(l, &f);
		buf_consume(&in, f.len);
		any = true;
	}
	l->delivering = false;
	if (l->freed) {
		buf_fini(&in);
		buf_fini(&l->in);
		free(l);
		return any;
	}
	/* What came meanwhile follows what is left over. */
	if (buf_len(&l->in) && buf_add(&in, buf_data(&l->in), buf_len(&l->in)) < 0)
		r = err_set(&e, -ENOMEM, "out of memory");
	buf_fini(&l->in);
	l->in = in;
	if (r < 0)
		link_end(l, e.text);
	return any;
}

static bool deliver_in_memory(struct link *l)
{
	const struct link *sender = l->peer;
	bool any = deliver(l);

	if (any && !buf_len(&l->in) && sender->ops && sender->ops->on_drained)
		sender->ops->on_drained(sender->data);
	return any;
}

static void on_pair(void *data)
{
	struct link *a = data;
	bool busy = true;

	while (busy) {
		busy = deliver_in_memory(a->peer);
		busy = deliver_in_memory(a) || busy;
	}
}

static int send_now(struct link *l)
{
	while (buf_len(&l->out)) {
		ssize_t n = send(l->fd, buf_data(&l->out), buf_len(&l->out),
				 MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN ? 0 : -errno;
		buf_consume(&l->out, (size_t)n);
	}
	return 0;
}

static void wait_for_more(struct link *l)
{
	if (l->watch)
		watch_set(l->watch, (l->held ? 0 : WATCH_READ) |
					    (buf_len(&l->out) ? WATCH_WRITE : 0));
}

static void on_readable(struct link *l)
{
	uint8_t *to = buf_reserve(&l->in, READ_SIZE);
	ssize_t n = to ? recv(l->fd, to, READ_SIZE, MSG_DONTWAIT) : -1;

	if (n < 0 && to && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		link_end(l, NULL);
		return;
	}
	buf_grow(&l->in, (size_t)n);
	(void)deliver(l);
}

static void on_ready(void *data, int events)
{
	struct link *l = data;

	if (events & WATCH_WRITE) {
		/* A send that fails means the peer is gone; reading says so too,
		 * after what it still had to say. */
		if (send_now(l) < 0)
			buf_fini(&l->out);
		wait_for_more(l);
		if (!buf_len(&l->out) && l->ops && l->ops->on_drained)
			l->ops->on_drained(l->data);
	}
	if (events & WATCH_READ && l->watch)
		on_readable(l);
}

DEFINE_OWN(link, struct link, link_free)

int link_new(struct link **ret, struct loop *loop, int fd, struct err *err)
{
	OWN(own_link) struct link *l = calloc(1, sizeof(*l));
	int r;

	if (!l) {
		own_close(&fd);
		return err_set(err, -ENOMEM, "link");
	}
	l->fd = fd;
	r = watch_new(&l->watch, loop, fd, WATCH_READ, on_ready, l, err);
	if (r < 0)
		return r;
	*ret = take(l);
	return 0;
}

int link_new_pair(struct link **ret_a, struct link **ret_b, struct loop *loop,
		  struct err *err)
{
	OWN(own_link) struct link *a = calloc(1, sizeof(*a));
	OWN(own_link) struct link *b = calloc(1, sizeof(*b));
	int r;

	if (!a || !b)
		return err_set(err, -ENOMEM, "link");
	a->fd = b->fd = -1;
	r = prelude_new(&a->prelude, loop, on_pair, a, err);
	if (r < 0)
		return r;
	a->peer = b;
	b->peer = a;
	*ret_a = take(a);
	*ret_b = take(b);
	return 0;
}

void link_set_handler(struct link *l, const struct link_ops *ops, void *data)
{
	l->ops = ops;
	l->data = data;
}

struct link *link_free(struct link *l)
{
	if (!l)
		return NULL;
	l->watch = watch_free(l->watch);
	l->prelude = prelude_free(l->prelude);
	if (l->peer) {
		l->peer->prelude = prelude_free(l->peer->prelude);
		l->peer->ended = true;
		l->peer->peer = NULL;
		l->peer = NULL;
	}
	own_close(&l->fd);
	buf_fini(&l->out);
	l->ended = true;
	if (l->delivering) {
		l->freed = true; /* deliver() is below us on the stack */
		return NULL;
	}
	buf_fini(&l->in);
	free(l);
	return NULL;
}

int link_send(struct link *l, unsigned type, const void *msg)
{
	struct buf *to = l->peer ? &l->peer->in : &l->out;
	bool idle = !buf_len(&l->out);
	int r;

	if (l->ended)
		return -EPIPE;
	r = frame_encode(to, type, 0, message_of(type), msg);
	if (r < 0)
		return r;
	if (l->peer) {
		prelude_again(l->prelude ? l->prelude : l->peer->prelude);
		return 0;
	}
	if (idle && send_now(l) < 0)
		buf_fini(&l->out);
	wait_for_more(l);
	return 0;
}

size_t link_backlog(const struct link *l)
{
	return l->peer ? buf_len(&l->peer->in) : buf_len(&l->out);
}

void link_hold(struct link *l, bool on)
{
	l->held = on;
	wait_for_more(l);
}
