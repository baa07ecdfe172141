#include "base/buf.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/own.h"

enum { KEEP = 4096 };

void buf_fini(struct buf *b)
{
	free(b->mem);
	*b = (struct buf){ 0 };
}

uint8_t *buf_reserve(struct buf *b, size_t len)
{
	size_t used = buf_len(b), cap = b->cap ? b->cap : 256;
	uint8_t *mem;

	if (b->cap && b->cap - b->end >= len)
		return b->mem + b->end;
	if (len > SIZE_MAX / 4 || used > SIZE_MAX / 4)
		return NULL;
	while (cap < used + len)
		cap *= 2;
	/* Moving to the front is cheap as long as less than half is in use. */
	if (cap == b->cap && used <= cap / 2) {
		memmove(b->mem, b->mem + b->start, used);
	} else {
		if (cap == b->cap)
			cap *= 2;
		mem = malloc(cap);
		if (!mem)
			return NULL;
		if (used)
			memcpy(mem, b->mem + b->start, used);
		free(b->mem);
		b->mem = mem;
		b->cap = cap;
	}
	b->start = 0;
	b->end = used;
	return b->mem + b->end;
}

int buf_add(struct buf *b, const void *data, size_t len)
{
	uint8_t *to = buf_reserve(b, len);

	if (!to)
		return -ENOMEM;
	if (len)
		memcpy(to, data, len);
	b->end += len;
	return 0;
}

int buf_add_str(struct buf *b, const char *text)
{
	return buf_add(b, text, strlen(text));
}

int buf_addf(struct buf *b, const char *fmt, ...)
{
	OWN_MEM char *text = NULL;
	va_list ap;
	int len;

	va_start(ap, fmt);
	len = vasprintf(&text, fmt, ap);
	va_end(ap);
	if (len < 0) {
		text = NULL;
		return -ENOMEM;
	}
	return buf_add(b, text, (size_t)len);
}

void buf_consume(struct buf *b, size_t len)
{
	b->start += len;
	if (b->start < b->end)
		return;
	b->start = b->end = 0;
	if (b->cap > KEEP)
		buf_fini(b);
}
