#pragma once

/*
 * A NULL-terminated array of strings that owns them: argument vectors and
 * environments. Strings are bytes without NUL; nothing is assumed of them.
 * All zero is an empty array.
 */

#include <stddef.h>

struct strv {
	char **v; /* NULL-terminated once anything was added */
	size_t n, cap;
};

void strv_fini(struct strv *s);

/* Append a copy. Returns 0 or -ENOMEM. */
int strv_add(struct strv *s, const char *text);
int strv_addn(struct strv *s, const char *text, size_t len);
int strv_addf(struct strv *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Append copies of all strings of the NULL-terminated @list. */
int strv_add_all(struct strv *s, char *const *list);

/* The value of @name in the environment @env, or NULL; either may be NULL. */
const char *env_get(char *const *env, const char *name);

/* For environments, entries "NAME=value". strv_env_get() returns the value or
 * NULL; strv_env_set() replaces the first entry of that name or appends one;
 * strv_env_unset() removes every entry of that name. */
const char *strv_env_get(const struct strv *s, const char *name);
int strv_env_set(struct strv *s, const char *name, const char *value);
void strv_env_unset(struct strv *s, const char *name);
