/* What every subcommand needs to talk to people. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/path.h"
#include "cmd/cmd.h"

void say_error(const char *text, const char *hint)
{
	fprintf(stderr, "accel: %s\n", text);
	if (hint && *hint)
		fprintf(stderr, "%s\n", hint);
}

void say_warning(const char *fmt, ...)
{
	va_list ap;

	fputs("accel: ", stderr);
	va_start(ap, fmt);
	(void)vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
}

int terminal_width(void)
{
	struct winsize w;

	if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col >= 20)
		return w.ws_col;
	return 80;
}

int print_out(struct buf *out)
{
	int r = fd_write_all(STDOUT_FILENO, buf_data(out), buf_len(out));

	buf_fini(out);
	return r < 0 ? 1 : 0;
}
