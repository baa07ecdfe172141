#include "cmd/sink.h"

#include <errno.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "base/loop.h"
#include "base/path.h"

/* POLLOUT promises this much to a pipe; the descriptor is shared with other
 * programs, so it is not ours to make nonblocking. */
enum { CHUNK = 4096 };

static bool can_write(int fd, int timeout_ms)
{
	struct pollfd p = { .fd = fd, .events = POLLOUT };

	return poll(&p, 1, timeout_ms) > 0;
}

/* False when it would block or failed. */
static bool write_chunk(struct sink *s)
{
	size_t len = buf_len(&s->backlog) < CHUNK ? buf_len(&s->backlog) : CHUNK;
	ssize_t n = write(s->fd, buf_data(&s->backlog), len);

	if (n < 0) {
		if (errno != EAGAIN && errno != EINTR) {
			s->error = errno;
			buf_fini(&s->backlog);
		}
		return false;
	}
	buf_consume(&s->backlog, (size_t)n);
	return true;
}

static void write_some(struct sink *s)
{
	while (buf_len(&s->backlog) && can_write(s->fd, 0))
		if (!write_chunk(s))
			break;
	if (s->given_up)
		buf_fini(&s->backlog);
	watch_set(s->watch, buf_len(&s->backlog) ? WATCH_WRITE : 0);
}

static void on_ready(void *data, int events)
{
	struct sink *s = data;

	(void)events;
	write_some(s);
	s->on_change(s->data);
}

int sink_init(struct sink *s, struct loop *loop, int fd, void (*on_change)(void *data),
	      void *data, struct err *err)
{
	int r;

	*s = (struct sink){ .fd = fd, .on_change = on_change, .data = data };
	r = watch_new(&s->watch, loop, fd, 0, on_ready, s, err);
	return r == -EPERM ? 0 : r; /* a regular file */
}

void sink_fini(struct sink *s)
{
	s->watch = watch_free(s->watch);
	buf_fini(&s->backlog);
}

void sink_write(struct sink *s, const void *bytes, size_t len)
{
	int r;

	if (s->error || !len)
		return;
	if (!s->watch) {
		r = fd_write_all(s->fd, bytes, len);
		if (r < 0) {
			s->error = -r;
			s->on_change(s->data);
		}
		return;
	}
	if (buf_add(&s->backlog, bytes, len) < 0)
		return;
	if (buf_len(&s->backlog) == len || buf_len(&s->backlog) > CHUNK || s->given_up)
		write_some(s);
	if (s->error)
		s->on_change(s->data);
}

void sink_give_up(struct sink *s)
{
	s->given_up = true;
	if (s->watch)
		write_some(s);
}
