#pragma once

/*
 * Bytes: a slice borrows them, a buf owns them.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* A run of bytes owned by somebody else. */
struct slice {
	const uint8_t *data;
	size_t len;
};

static inline struct slice slice_of(const void *data, size_t len)
{
	return (struct slice){ data, len };
}

static inline struct slice slice_str(const char *text)
{
	return (struct slice){ (const uint8_t *)text, strlen(text) };
}

static inline bool slice_eq(struct slice a, struct slice b)
{
	return a.len == b.len && (!a.len || !memcmp(a.data, b.data, a.len));
}

/* A queue of bytes: appended at the end, consumed from the front. All zero is
 * an empty buffer. */
struct buf {
	uint8_t *mem;
	size_t start, end, cap;
};

void buf_fini(struct buf *b);

static inline size_t buf_len(const struct buf *b)
{
	return b->end - b->start;
}

static inline uint8_t *buf_data(const struct buf *b)
{
	return b->mem ? b->mem + b->start : NULL;
}

static inline struct slice buf_slice(const struct buf *b)
{
	return (struct slice){ buf_data(b), buf_len(b) };
}

/* Make room for @len more bytes and return where they go, or NULL when memory
 * is short; buf_grow() then says how many were written there. */
uint8_t *buf_reserve(struct buf *b, size_t len);

static inline void buf_grow(struct buf *b, size_t len)
{
	b->end += len;
}

/* Append. Returns 0, or -ENOMEM with the buffer as it was. */
int buf_add(struct buf *b, const void *data, size_t len);
int buf_add_str(struct buf *b, const char *text);
int buf_addf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Drop @len bytes from the front. Memory beyond a page is given back once empty. */
void buf_consume(struct buf *b, size_t len);
