/*
 * Option tables: parsing, help, and the value syntaxes that options, variables
 * and files share. It knows no option by name; what a value means is the
 * callback's business.
 */

#include "base/opt.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/near.h"
#include "base/own.h"

enum {
	SHOWN = 64,    /* bytes of a word in a message */
	WORDS = 512,   /* names looked at for a near one */
	LEFT_MAX = 30, /* widest left column of the help */
	NARROW = 60,   /* below this the help text gets lines of its own */
	NARROW_INDENT = 8,
};

static const struct {
	const char *word;
	bool value;
} bool_words[] = {
	{ "true", true },   { "yes", true }, { "on", true },   { "1", true },
	{ "false", false }, { "no", false }, { "off", false }, { "0", false },
};

static const struct {
	const char *name;
	unsigned ms;
} units[] = {
	{ "", 1000 },       { "ms", 1 },          { "s", 1000 },
	{ "m", 60 * 1000 }, { "h", 3600 * 1000 },
};

static const unsigned long long year_ms = 365ULL * 24 * 3600 * 1000;

#define LEN(array) (sizeof(array) / sizeof((array)[0]))

/* --- values --- */

int parse_bool(bool *ret, const char *text)
{
	for (size_t i = 0; i < LEN(bool_words); i++) {
		if (strcasecmp(text, bool_words[i].word))
			continue;
		*ret = bool_words[i].value;
		return 0;
	}
	return -EINVAL;
}

/* ASCII's only, whatever the locale: isdigit() is not asked. */
static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

int parse_int(long long *ret, const char *text, long long min, long long max)
{
	bool negative = *text == '-', over = false;
	const char *p = text + negative;
	long long n = 0;

	if (!*p)
		return -EINVAL;
	/* Counted downwards, since the smallest number has no positive twin. */
	for (; *p; p++) {
		if (!is_digit(*p))
			return -EINVAL;
		over |= __builtin_mul_overflow(n, 10, &n);
		over |= __builtin_sub_overflow(n, *p - '0', &n);
	}
	if (over || (!negative && n == LLONG_MIN))
		return -ERANGE;
	n = negative ? n : -n;
	if (n < min || n > max)
		return -ERANGE;
	*ret = n;
	return 0;
}

/* The digits after the point, in millionths, rounded up. */
static const char *parse_fraction(const char *p, unsigned long long *ret)
{
	unsigned long long millionths = 0, scale = 100000;
	bool rest = false;

	for (; is_digit(*p); p++, scale /= 10) {
		millionths += (unsigned)(*p - '0') * scale;
		rest |= !scale && *p != '0';
	}
	*ret = millionths + rest;
	return p;
}

int parse_duration_ms(unsigned long long *ret, const char *text)
{
	unsigned long long whole = 0, millionths = 0, ms;
	const char *p = text;
	size_t unit = 0;

	if (!is_digit(*p))
		return -EINVAL;
	for (; is_digit(*p); p++)
		if (whole <= year_ms) /* more cannot be in range, and must not wrap */
			whole = whole * 10 + (unsigned)(*p - '0');
	if (*p == '.') {
		if (!is_digit(p[1]))
			return -EINVAL;
		p = parse_fraction(p + 1, &millionths);
	}
	if (*p == ' ' && p[1])
		p++;
	while (unit < LEN(units) && strcmp(p, units[unit].name))
		unit++;
	if (unit == LEN(units))
		return -EINVAL;
	if (whole > year_ms / units[unit].ms)
		return -ERANGE;
	ms = whole * units[unit].ms + (millionths * units[unit].ms + 999999) / 1000000;
	if (ms > year_ms)
		return -ERANGE;
	*ret = ms;
	return 0;
}

/* --- text for messages --- */

/* Bytes of the UTF-8 character at @p, or 0 when it is none that can be shown. */
static size_t char_len(const unsigned char *p)
{
	size_t len = *p < 0x80 ? 1 : *p < 0xc2 ? 0 : *p < 0xe0 ? 2 : *p < 0xf0 ? 3 : 4;

	if (*p < 0x20 || *p == 0x7f || *p > 0xf4)
		return 0;
	/* C1 controls, over-long forms, surrogates, beyond the last code point. */
	if ((*p == 0xc2 && p[1] < 0xa0) || (*p == 0xe0 && p[1] < 0xa0) ||
	    (*p == 0xed && p[1] > 0x9f) || (*p == 0xf0 && p[1] < 0x90) ||
	    (*p == 0xf4 && p[1] > 0x8f))
		return 0;
	for (size_t i = 1; i < len; i++)
		if ((p[i] & 0xc0) != 0x80)
			return 0;
	return len;
}

const char *printable(char *out, size_t size, const char *text)
{
	const unsigned char *p = (const unsigned char *)text;
	size_t used = 0, fits = 0;

	while (*p) {
		size_t len = char_len(p), shown = len ? len : 1;

		if (used + shown >= size) {
			strcpy(out + fits, "...");
			return out;
		}
		if (len)
			memcpy(out + used, p, len);
		else
			out[used] = '?';
		used += shown;
		p += shown;
		if (used + 3 < size)
			fits = used;
	}
	out[used] = 0;
	return out;
}

/* --- parsing --- */

/* Is @word, of @len bytes, the name @name (up to '|' or its end)? */
static bool same_name(const char *name, const char *word, size_t len)
{
	size_t i;

	for (i = 0; i < len && name[i] && name[i] != '|'; i++) {
		char a = name[i] == '_' ? '-' : name[i],
		     b = word[i] == '_' ? '-' : word[i];

		if (a != b)
			return false;
	}
	return i == len && (!name[i] || name[i] == '|');
}

static bool has_name(const struct opt *o, const char *word, size_t len)
{
	if (same_name(o->name, word, len))
		return true;
	for (const char *a = o->aliases; a; a = strchr(a, '|')) {
		a += *a == '|';
		if (same_name(a, word, len))
			return true;
	}
	return false;
}

/* A linear search: a command line has a few words, a table 150 rows. */
static const struct opt *find_long(const struct opt *table, size_t n, const char *word,
				   size_t len)
{
	for (size_t i = 0; i < n; i++)
		if (has_name(&table[i], word, len))
			return &table[i];
	return NULL;
}

static const struct opt *find_short(const struct opt *table, size_t n, char c)
{
	for (size_t i = 0; i < n; i++)
		if (table[i].short_name && table[i].short_name == c)
			return &table[i];
	return NULL;
}

/* Fill @words with every long name of the table; aliases are copied to @held. */
static size_t all_names(const struct opt *table, size_t n, const char **words,
			char held[][SHOWN])
{
	size_t count = 0, copied = 0;

	for (size_t i = 0; i < n && count < WORDS; i++)
		words[count++] = table[i].name;
	for (size_t i = 0; i < n; i++)
		for (const char *a = table[i].aliases; a && copied < WORDS / 4;
		     a = strchr(a, '|')) {
			size_t len;

			a += *a == '|';
			len = strcspn(a, "|");
			if (len >= SHOWN || count == WORDS)
				continue;
			memcpy(held[copied], a, len);
			held[copied][len] = 0;
			words[count++] = held[copied++];
		}
	return count;
}

/* What was unknown is @word, of which @len bytes name the option. */
static int unknown_option(const struct opt *table, size_t n, const char *word, size_t len,
			  struct err *err)
{
	const char *words[WORDS], *near = NULL;
	char held[WORDS / 4][SHOWN], shown[SHOWN];
	OWN_MEM char *name = strndup(word, len);

	if (!name)
		return err_set(err, -ENOMEM, "options");
	if (!strncmp(name, "--", 2))
		near = near_match(name + 2, words, all_names(table, n, words, held));
	return err_set(err, -EINVAL, "unknown option %s%s%s%s",
		       printable(shown, sizeof(shown), name),
		       near ? " (did you mean --" : "", near ? near : "",
		       near ? "?)" : "");
}

static int give_flag(const struct opt *o, const char *value, on_opt_fn *fn, void *data,
		     struct err *err)
{
	char shown[SHOWN];
	bool on = true;

	if (value && parse_bool(&on, value) < 0)
		return err_set(err, -EINVAL,
			       "--%s: '%s' is not allowed; allowed: true, false", o->name,
			       printable(shown, sizeof(shown), value));
	return fn(data, o, on ? "true" : "false", err);
}

/* @i is the word's index. Returns how many words were consumed. */
static int parse_long(const struct opt *table, size_t n, int argc, char **argv, int i,
		      on_opt_fn *fn, void *data, struct err *err)
{
	const char *name = argv[i] + 2, *value = strchr(name, '=');
	size_t len = value ? (size_t)(value - name) : strlen(name);
	const struct opt *o = find_long(table, n, name, len);
	int used = 1, r;

	if (!o)
		return unknown_option(table, n, argv[i], len + 2, err);
	value = value ? value + 1 : NULL;
	if (!o->arg) {
		r = give_flag(o, value, fn, data, err);
		return r < 0 ? r : 1;
	}
	if (!value && i + 1 == argc)
		return err_set(err, -EINVAL, "--%s needs a value: --%s %s", o->name,
			       o->name, o->arg);
	if (!value) {
		value = argv[i + 1];
		used = 2;
	}
	r = fn(data, o, value, err);
	return r < 0 ? r : used;
}

/* One word of short options: flags may share it, and the last may take a value,
 * the rest of the word or the next one. */
static int parse_short(const struct opt *table, size_t n, int argc, char **argv, int i,
		       on_opt_fn *fn, void *data, struct err *err)
{
	for (const char *p = argv[i] + 1; *p; p++) {
		const struct opt *o = find_short(table, n, *p);
		int r;

		if (!o && p == argv[i] + 1)
			return unknown_option(table, n, argv[i], strlen(argv[i]), err);
		if (!o)
			return err_set(err, -EINVAL, "unknown option -%c in %s",
				       isprint((unsigned char)*p) ? *p : '?', argv[i]);
		if (!o->arg) {
			r = give_flag(o, NULL, fn, data, err);
			if (r < 0)
				return r;
			continue;
		}
		if (!p[1] && i + 1 == argc)
			return err_set(err, -EINVAL, "-%c needs a value: -%c %s",
				       o->short_name, o->short_name, o->arg);
		r = fn(data, o, p[1] ? p + 1 : argv[i + 1], err);
		return r < 0 ? r : p[1] ? 1 : 2;
	}
	return 1;
}

/* Not getopt_long(): it guesses names from their beginning, takes '-' and '_' for
 * different, and reorders nothing only when asked. */
int opt_parse(const struct opt *table, size_t n, int argc, char **argv, on_opt_fn *fn,
	      void *data, struct err *err)
{
	int i = 1;

	while (i < argc) {
		int used;

		if (argv[i][0] != '-' || !argv[i][1])
			return i;
		if (!strcmp(argv[i], "--"))
			return i + 1;
		if (argv[i][1] == '-')
			used = parse_long(table, n, argc, argv, i, fn, data, err);
		else
			used = parse_short(table, n, argc, argv, i, fn, data, err);
		if (used < 0)
			return used;
		i += used;
	}
	return argc;
}

/* --- help --- */

/* "  -n, --num-processes N" */
static int add_left(struct buf *out, const struct opt *o)
{
	int r = o->short_name ? buf_addf(out, "  -%c, --%s", o->short_name, o->name)
			      : buf_addf(out, "      --%s", o->name);

	return r < 0 || !o->arg ? r : buf_addf(out, " %s", o->arg);
}

static size_t left_width(const struct opt *o)
{
	return 8 + strlen(o->name) + (o->arg ? 1 + strlen(o->arg) : 0);
}

static int add_blanks(struct buf *out, size_t n)
{
	return buf_addf(out, "%*s", (int)n, "");
}

/* Words of @text in lines of at most @width, each further line indented.
 * @at is the column where the first one starts; returns the one it ended in. */
static int add_wrapped(struct buf *out, const char *text, size_t indent, size_t *at,
		       size_t width)
{
	while (*text) {
		size_t len = strcspn(text, " ");
		int r = 0;

		if (*at > indent && *at + 1 + len > width) {
			r = buf_addf(out, "\n%*s", (int)indent, "");
			*at = indent;
		} else if (*at > indent) {
			r = add_blanks(out, 1);
			*at += 1;
		}
		if (r == 0)
			r = buf_add(out, text, len);
		if (r < 0)
			return r;
		*at += len;
		text += len + strspn(text + len, " ");
	}
	return 0;
}

static int add_option(struct buf *out, const struct opt *o, size_t column, size_t width)
{
	size_t used = left_width(o), at = column;
	OWN_MEM char *tail = NULL;
	int r = add_left(out, o);

	if (r == 0 && used + 2 > column)
		r = buf_addf(out, "\n%*s", (int)column, "");
	else if (r == 0)
		r = add_blanks(out, column - used);
	if (r == 0)
		r = add_wrapped(out, o->help, column, &at, width);
	if (r == 0 && o->def && asprintf(&tail, "(default: %s)", o->def) < 0) {
		tail = NULL;
		r = -ENOMEM;
	}
	if (r == 0 && tail)
		r = add_wrapped(out, tail, column, &at, width);
	return r < 0 ? r : buf_add_str(out, "\n");
}

static bool same_group(const struct opt *a, const struct opt *b)
{
	return !strcmp(a->group ? a->group : "", b->group ? b->group : "");
}

static bool group_began_before(const struct opt *table, size_t i)
{
	for (size_t k = 0; k < i; k++)
		if (same_group(&table[k], &table[i]))
			return true;
	return false;
}

/* Where the help texts start: after the widest name that is not too wide. */
static size_t help_column(const struct opt *table, size_t n, int width)
{
	size_t widest = 0;

	if (width < NARROW)
		return NARROW_INDENT;
	for (size_t i = 0; i < n; i++) {
		size_t w = left_width(&table[i]);

		if (w > widest && w <= LEFT_MAX)
			widest = w;
	}
	return (widest ? widest : LEFT_MAX) + 2;
}

int opt_help(struct buf *out, const struct opt *table, size_t n, int width)
{
	size_t column = help_column(table, n, width);
	int r = 0;

	for (size_t i = 0; i < n && r == 0; i++) {
		if (group_began_before(table, i))
			continue;
		r = buf_addf(out, "%s%s:\n", i ? "\n" : "",
			     table[i].group ? table[i].group : "Options");
		for (size_t k = i; k < n && r == 0; k++)
			if (same_group(&table[k], &table[i]))
				r = add_option(out, &table[k], column,
					       width > 20 ? (size_t)width : 20);
	}
	return r;
}
