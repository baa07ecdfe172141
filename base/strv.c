#include "base/strv.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/own.h"

void strv_fini(struct strv *s)
{
	for (size_t i = 0; i < s->n; i++)
		free(s->v[i]);
	free(s->v);
	*s = (struct strv){ 0 };
}

/* Takes ownership of @text, which may be NULL after a failed allocation. */
static int strv_push(struct strv *s, char *text)
{
	OWN_MEM char *held = text;

	if (!held)
		return -ENOMEM;
	if (s->n + 2 > s->cap) {
		size_t cap = s->cap ? s->cap * 2 : 16;
		char **v = reallocarray(s->v, cap, sizeof(*v));

		if (!v)
			return -ENOMEM;
		s->v = v;
		s->cap = cap;
	}
	s->v[s->n++] = take(held);
	s->v[s->n] = NULL;
	return 0;
}

int strv_add(struct strv *s, const char *text)
{
	return strv_push(s, strdup(text));
}

int strv_addn(struct strv *s, const char *text, size_t len)
{
	return strv_push(s, strndup(text, len));
}

int strv_addf(struct strv *s, const char *fmt, ...)
{
	char *text = NULL;
	va_list ap;

	va_start(ap, fmt);
	if (vasprintf(&text, fmt, ap) < 0)
		text = NULL;
	va_end(ap);
	return strv_push(s, text);
}

int strv_add_all(struct strv *s, char *const *list)
{
	for (; list && *list; list++) {
		int r = strv_add(s, *list);

		if (r < 0)
			return r;
	}
	return 0;
}

static bool is_entry_of(const char *entry, const char *name, size_t len)
{
	return !strncmp(entry, name, len) && entry[len] == '=';
}

const char *env_get(char *const *env, const char *name)
{
	size_t len = name ? strlen(name) : 0;

	for (; name && env && *env; env++)
		if (is_entry_of(*env, name, len))
			return *env + len + 1;
	return NULL;
}

const char *strv_env_get(const struct strv *s, const char *name)
{
	return env_get(s->v, name);
}

int strv_env_set(struct strv *s, const char *name, const char *value)
{
	size_t len = strlen(name);
	char *entry = NULL;

	if (asprintf(&entry, "%s=%s", name, value) < 0)
		return -ENOMEM;
	for (size_t i = 0; i < s->n; i++) {
		if (!is_entry_of(s->v[i], name, len))
			continue;
		free(s->v[i]);
		s->v[i] = entry;
		return 0;
	}
	return strv_push(s, entry);
}

void strv_env_unset(struct strv *s, const char *name)
{
	size_t len = strlen(name), kept = 0;

	for (size_t i = 0; i < s->n; i++) {
		if (is_entry_of(s->v[i], name, len))
			free(s->v[i]);
		else
			s->v[kept++] = s->v[i];
	}
	s->n = kept;
	if (s->v)
		s->v[kept] = NULL;
}
