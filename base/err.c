#include "base/err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* A sentence that did not fit says so. */
static void clip(char *text, int len)
{
	if (len >= ERR_MAX)
		memcpy(text + ERR_MAX - 4, "...", 4);
}

int err_set(struct err *err, int code, const char *fmt, ...)
{
	va_list ap;

	if (code >= 0)
		code = -EINVAL;
	if (!err)
		return code;

	err->code = code;
	va_start(ap, fmt);
	clip(err->text, vsnprintf(err->text, sizeof(err->text), fmt, ap));
	va_end(ap);
	return code;
}

int err_sys(struct err *err, const char *fmt, ...)
{
	int saved = errno;
	char what[ERR_MAX];
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(what, sizeof(what), fmt, ap);
	va_end(ap);
	return err_set(err, -saved, "%s: %s", what, strerror(saved));
}

int err_wrap(struct err *err, int code, const char *fmt, ...)
{
	char head[ERR_MAX], tail[ERR_MAX];
	va_list ap;

	if (!err)
		return code;

	va_start(ap, fmt);
	(void)vsnprintf(head, sizeof(head), fmt, ap);
	va_end(ap);
	memcpy(tail, err->text, sizeof(tail));
	return err_set(err, code, "%s: %s", head, tail);
}
