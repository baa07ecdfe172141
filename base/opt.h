#pragma once

/*
 * Command-line options, declared as a table; parsing and help come from it.
 *
 * --name VALUE, --name=VALUE, -n VALUE, -nVALUE; '-' and '_' are the same in a
 * long name. A flag may be given a value with '=' only (--cpu=false), which
 * must be a boolean. Parsing stops at the first word that is no option, or
 * after "--": what follows belongs to somebody else. Names are never guessed
 * from a prefix.
 */

#include <stdbool.h>
#include <stddef.h>

struct buf;
struct err;

struct opt {
	const char *name;    /* long name, with hyphens, without the dashes */
	char short_name;     /* or 0 */
	const char *arg;     /* what the value is called in the help; NULL: a flag */
	const char *aliases; /* further long names, "a|b", or NULL */
	const char *group;   /* heading in the help */
	const char *help;    /* one line; wrapped to the terminal's width */
	int id;              /* for the callback */
	const char *def;     /* default, shown after the help; NULL: none */
};

/* Called for each option as it is met. A flag comes with "true" or "false". */
typedef int on_opt_fn(void *data, const struct opt *o, const char *value,
		      struct err *err);

/* Parse @argv from index 1. Returns the index of the first word that was not
 * consumed (@argc when there is none), or -EINVAL: unknown option with the
 * nearest name, missing value, value given to a flag that is no boolean, or
 * what the callback returned. */
int opt_parse(const struct opt *table, size_t n, int argc, char **argv, on_opt_fn *fn,
	      void *data, struct err *err);

/* Append the options of the table, by group, as "accel X --help" prints them. */
int opt_help(struct buf *out, const struct opt *table, size_t n, int width);

/* Words people use for booleans: true/false, yes/no, on/off, 1/0, in any case.
 * Returns 0, or -EINVAL for any other word. */
int parse_bool(bool *ret, const char *text);

/* Whole decimal numbers only: no sign but '-', no exponent, no blanks.
 * -EINVAL for anything else, -ERANGE outside [@min, @max]. */
int parse_int(long long *ret, const char *text, long long min, long long max);

/* A time: seconds as a decimal number, or with the unit ms, s, m, h, which one
 * blank may precede. Rounded up to whole milliseconds. -EINVAL, or -ERANGE
 * beyond a year. */
int parse_duration_ms(unsigned long long *ret, const char *text);

/* Text from outside, as a message may hold it: control bytes and what is not
 * UTF-8 become '?', and what does not fit ends in "...". Returns @out. */
const char *printable(char *out, size_t size, const char *text);
