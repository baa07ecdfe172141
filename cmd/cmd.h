#pragma once

/* What the subcommands share. Each returns the exit code of the program. */

#include <stddef.h>

struct buf;
struct config;
struct err;

enum {
	EXIT_USAGE = 2,
	EXIT_CONFIG = 3,
	EXIT_LOST = 4,
	EXIT_BUG = 70,
};

/* argv[0] is the subcommand's name. */
int cmd_launch(int argc, char **argv);
int cmd_config(int argc, char **argv);
int cmd_status(int argc, char **argv);

/* "accel: TEXT", then @hint on a line of its own ("" or NULL: none), on stderr. */
void say_error(const char *text, const char *hint);
void say_warning(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Columns of the terminal on stdout, 80 where there is none. */
int terminal_width(void);

/* Write @out to stdout and empty it. Returns 0, or 1 when stdout is gone. */
int print_out(struct buf *out);
