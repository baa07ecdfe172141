#pragma once

/*
 * Errors.
 *
 * A function that can fail returns int: 0 (or a documented count) on success,
 * a negative errno value on failure, and takes a struct err * as its last
 * argument. On failure it fills that object before returning; on success it
 * leaves it alone. The caller owns the object, usually on its stack, so there
 * is nothing to free. NULL is accepted where nobody will read the message.
 *
 * Only main() and the supervisor's top-level handlers print one.
 */

#define ERR_MAX 512

struct err {
	int code; /* negative errno, 0 while unset */
	char text[ERR_MAX];
};

/* Describe a new failure. Returns @code, so callers can write
 * "return err_set(...)". A non-negative @code is a bug and becomes -EINVAL. */
int err_set(struct err *err, int code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4), cold));

/* Like err_set() with -errno, and its text appended after a colon. */
int err_sys(struct err *err, const char *fmt, ...)
	__attribute__((format(printf, 2, 3), cold));

/* Put context in front of an existing failure: "context: text". Returns @code,
 * which is the one that was already there. */
int err_wrap(struct err *err, int code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4), cold));
