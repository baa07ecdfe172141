#include "base/loop.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <uv.h>

#include "base/err.h"
#include "base/own.h"

struct loop {
	uv_loop_t uv;
	uv_prepare_t prepare;
	uv_idle_t again; /* running, it keeps the loop from sleeping */
	struct prelude *preludes;
};

struct watch {
	uv_poll_t uv;
	on_ready_fn *fn;
	void *data;
	int events;
};

struct timer {
	uv_timer_t uv;
	on_timer_fn *fn;
	void *data;
};

struct sigwatch {
	uv_signal_t uv;
	on_signal_fn *fn;
	void *data;
};

struct prelude {
	struct loop *loop;
	struct prelude *next;
	on_prelude_fn *fn;
	void *data;
};

/* The handle is the first member of each object, so this frees the object. */
static void on_closed(uv_handle_t *h)
{
	free(h);
}

static void on_uv_prepare(uv_prepare_t *uv)
{
	struct loop *l = uv->data;

	(void)uv_idle_stop(&l->again);
	for (struct prelude *p = l->preludes; p; p = p->next)
		p->fn(p->data);
}

static void on_uv_idle(uv_idle_t *uv)
{
	(void)uv;
}

int loop_new(struct loop **ret, struct err *err)
{
	OWN_MEM struct loop *l = calloc(1, sizeof(*l));
	int r;

	if (!l)
		return err_set(err, -ENOMEM, "event loop");
	r = uv_loop_init(&l->uv);
	if (r < 0)
		return err_set(err, r, "event loop: %s", uv_strerror(r));
	(void)uv_idle_init(&l->uv, &l->again);
	(void)uv_prepare_init(&l->uv, &l->prepare);
	l->prepare.data = l;
	(void)uv_prepare_start(&l->prepare, on_uv_prepare);
	/* By itself it is no reason to keep the loop going. */
	uv_unref((uv_handle_t *)&l->prepare);
	*ret = take(l);
	return 0;
}

struct loop *loop_free(struct loop *l)
{
	if (!l)
		return NULL;
	uv_close((uv_handle_t *)&l->again, NULL);
	uv_close((uv_handle_t *)&l->prepare, NULL);
	(void)uv_run(&l->uv, UV_RUN_NOWAIT); /* lets closing handles go */
	while (uv_loop_close(&l->uv) == UV_EBUSY)
		if (!uv_run(&l->uv, UV_RUN_NOWAIT))
			break;
	free(l);
	return NULL;
}

void loop_run(struct loop *l)
{
	(void)uv_run(&l->uv, UV_RUN_DEFAULT);
}

void loop_once(struct loop *l)
{
	(void)uv_run(&l->uv, UV_RUN_ONCE);
}

void loop_stop(struct loop *l)
{
	uv_stop(&l->uv);
}

static void on_poll(uv_poll_t *uv, int status, int events);

void watch_set(struct watch *w, int events)
{
	int uv = 0;

	if (events == w->events)
		return;
	w->events = events;
	if (events & WATCH_READ)
		uv |= UV_READABLE;
	if (events & WATCH_WRITE)
		uv |= UV_WRITABLE;
	if (uv)
		(void)uv_poll_start(&w->uv, uv, on_poll);
	else
		(void)uv_poll_stop(&w->uv);
}

static void on_poll(uv_poll_t *uv, int status, int events)
{
	struct watch *w = (struct watch *)uv;
	int ready = 0, wanted = w->events;

	if (events & UV_READABLE)
		ready |= WATCH_READ;
	if (events & UV_WRITABLE)
		ready |= WATCH_WRITE;
	if (status < 0) {
		/* An error is found by whoever reads. libuv has stopped the handle,
		 * but there may be more to read than one look takes. */
		ready |= WATCH_READ;
		w->events = 0;
		watch_set(w, wanted);
	}
	w->fn(w->data, ready);
}

int watch_new(struct watch **ret, struct loop *l, int fd, int events, on_ready_fn *fn,
	      void *data, struct err *err)
{
	OWN_MEM struct watch *w = calloc(1, sizeof(*w));
	int r, flags = fcntl(fd, F_GETFL);

	if (!w)
		return err_set(err, -ENOMEM, "watch descriptor");
	r = uv_poll_init(&l->uv, &w->uv, fd);
	/* libuv made it nonblocking, for everybody who has it. */
	if (flags >= 0 && !(flags & O_NONBLOCK))
		(void)fcntl(fd, F_SETFL, flags);
	if (r < 0)
		return err_set(err, r, "watch descriptor %d: %s", fd, uv_strerror(r));
	w->fn = fn;
	w->data = data;
	watch_set(w, events);
	*ret = take(w);
	return 0;
}

struct watch *watch_free(struct watch *w)
{
	if (w)
		uv_close((uv_handle_t *)&w->uv, on_closed);
	return NULL;
}

static void on_uv_timer(uv_timer_t *uv)
{
	struct timer *t = (struct timer *)uv;

	t->fn(t->data);
}

int timer_new(struct timer **ret, struct loop *l, on_timer_fn *fn, void *data,
	      struct err *err)
{
	struct timer *t = calloc(1, sizeof(*t));

	if (!t)
		return err_set(err, -ENOMEM, "timer");
	(void)uv_timer_init(&l->uv, &t->uv);
	t->fn = fn;
	t->data = data;
	*ret = t;
	return 0;
}

struct timer *timer_free(struct timer *t)
{
	if (t)
		uv_close((uv_handle_t *)&t->uv, on_closed);
	return NULL;
}

void timer_start(struct timer *t, uint64_t delay_ms)
{
	/* libuv counts from the start of this round, which may be long ago. */
	uv_update_time(t->uv.loop);
	(void)uv_timer_start(&t->uv, on_uv_timer, delay_ms, 0);
}

void timer_stop(struct timer *t)
{
	(void)uv_timer_stop(&t->uv);
}

static void on_uv_signal(uv_signal_t *uv, int signo)
{
	struct sigwatch *s = (struct sigwatch *)uv;

	s->fn(s->data, signo);
}

int sigwatch_new(struct sigwatch **ret, struct loop *l, int signo, on_signal_fn *fn,
		 void *data, struct err *err)
{
	OWN_MEM struct sigwatch *s = calloc(1, sizeof(*s));
	int r;

	if (!s)
		return err_set(err, -ENOMEM, "watch signal %d", signo);
	r = uv_signal_init(&l->uv, &s->uv);
	if (r < 0)
		return err_set(err, r, "watch signal %d: %s", signo, uv_strerror(r));
	s->fn = fn;
	s->data = data;
	r = uv_signal_start(&s->uv, on_uv_signal, signo);
	if (r < 0) {
		(void)sigwatch_free(take(s));
		return err_set(err, r, "watch signal %d: %s", signo, uv_strerror(r));
	}
	*ret = take(s);
	return 0;
}

struct sigwatch *sigwatch_free(struct sigwatch *s)
{
	if (s)
		uv_close((uv_handle_t *)&s->uv, on_closed);
	return NULL;
}

int prelude_new(struct prelude **ret, struct loop *l, on_prelude_fn *fn, void *data,
		struct err *err)
{
	struct prelude *p = calloc(1, sizeof(*p)), **at = &l->preludes;

	if (!p)
		return err_set(err, -ENOMEM, "loop prelude");
	*p = (struct prelude){ .loop = l, .fn = fn, .data = data };
	while (*at)
		at = &(*at)->next;
	*at = p;
	*ret = p;
	return 0;
}

struct prelude *prelude_free(struct prelude *p)
{
	struct prelude **at;

	if (!p)
		return NULL;
	for (at = &p->loop->preludes; *at != p; at = &(*at)->next)
		;
	*at = p->next;
	free(p);
	return NULL;
}

void prelude_again(struct prelude *p)
{
	(void)uv_idle_start(&p->loop->again, on_uv_idle);
}
