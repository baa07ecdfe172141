/* The sentence of the last failure in each thread. */

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "runtime/world.h"

enum { TEXT_MAX = 4096 };

static _Thread_local char last[TEXT_MAX];

int fail(int code, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(last, sizeof(last), fmt, ap);
	va_end(ap);
	return code;
}

int fail_in(int code, const char *fmt, ...)
{
	char before[TEXT_MAX];
	va_list ap;
	size_t len;

	(void)memcpy(before, last, sizeof(before));
	va_start(ap, fmt);
	(void)vsnprintf(last, sizeof(last), fmt, ap);
	va_end(ap);
	len = strlen(last);
	(void)snprintf(last + len, sizeof(last) - len, ": %s", before);
	return code;
}

const char *accel_error(void)
{
	return last;
}

int accel_abi(void)
{
	return ACCEL_ABI;
}

const char *accel_version(void)
{
	return ACCEL_VERSION;
}
