#pragma once

/*
 * The event loop: libuv, wrapped once, so that everybody else owns plain
 * objects. libuv closes handles later, in the loop; here x_free() stops the
 * object at once (its callback never runs again, and a watched descriptor may
 * be closed straight after), and the memory follows when the loop lets go.
 *
 * One thread. loop_free() wants every object made on it freed before.
 */

#include <stdint.h>

struct err;
struct loop;
struct watch;
struct timer;
struct sigwatch;
struct prelude;

int loop_new(struct loop **ret, struct err *err);
struct loop *loop_free(struct loop *l);

/* Run until loop_stop(), or until nothing is left that could happen. */
void loop_run(struct loop *l);
void loop_stop(struct loop *l);

/* Wait for one round of events and handle it. */
void loop_once(struct loop *l);

/* Descriptors: pipes, sockets, pidfds, terminals; not regular files (-EPERM).
 * Their flags stay as they are: a terminal is shared with other programs.
 * Level-triggered. @events as passed to the callback also has WATCH_READ set
 * on hang-up or error, so that a read finds it. */
#define WATCH_READ 1
#define WATCH_WRITE 2
typedef void on_ready_fn(void *data, int events);
int watch_new(struct watch **ret, struct loop *l, int fd, int events, on_ready_fn *fn,
	      void *data, struct err *err);
struct watch *watch_free(struct watch *w);
/* Change what is waited for; 0 pauses. */
void watch_set(struct watch *w, int events);

/* One-shot timers, not running when made. Starting again moves the end. */
typedef void on_timer_fn(void *data);
int timer_new(struct timer **ret, struct loop *l, on_timer_fn *fn, void *data,
	      struct err *err);
struct timer *timer_free(struct timer *t);
void timer_start(struct timer *t, uint64_t delay_ms);
void timer_stop(struct timer *t);

/* Signals, delivered in the loop. */
typedef void on_signal_fn(void *data, int signo);
int sigwatch_new(struct sigwatch **ret, struct loop *l, int signo, on_signal_fn *fn,
		 void *data, struct err *err);
struct sigwatch *sigwatch_free(struct sigwatch *s);

/* Called each time before the loop waits, after all callbacks of one round; in
 * the order in which they were made. Freed outside such a call. */
typedef void on_prelude_fn(void *data);
int prelude_new(struct prelude **ret, struct loop *l, on_prelude_fn *fn, void *data,
		struct err *err);
struct prelude *prelude_free(struct prelude *p);
/* The next wait of the loop is no wait: the callback is due again at once. */
void prelude_again(struct prelude *p);
