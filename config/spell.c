/* YAML's spellings of values, as text to text; see spell.h. */

#include "config/spell.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* In any case, which takes in a few more than YAML's own three (No, no, NO). */
static const char *const false_words[] = { "no", "false", "off", "n" };
static const char *const true_words[] = { "yes", "true", "on", "y" };
static const char *const null_words[] = { "", "~", "null" };

/* Prefixes of numbers. "0" alone is the oldest, YAML 1.1's octal, and the last
 * since the others begin with it. */
static const struct {
	const char *prefix;
	int base;
} bases[] = {
	{ "0x", 16 },
	{ "0o", 8 },
	{ "0b", 2 },
	{ "0", 8 },
};

static bool is_word(const char *text, const char *const *words, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (!strcasecmp(text, words[i]))
			return true;
	return false;
}

#define IS_WORD(text, words) is_word(text, words, sizeof(words) / sizeof((words)[0]))

bool spell_is_null(const char *text)
{
	return IS_WORD(text, null_words);
}

static bool is_choice(const char *choices, const char *word)
{
	size_t len = strlen(word);

	while (*choices) {
		size_t n = strcspn(choices, "|");

		if (n == len && !strncasecmp(choices, word, n))
			return true;
		choices += n + (choices[n] != 0);
	}
	return false;
}

const char *spell_choice(const char *choices, const char *text)
{
	if (is_choice(choices, text))
		return text;
	if ((IS_WORD(text, false_words) || spell_is_null(text)) &&
	    is_choice(choices, "no"))
		return "no";
	if (IS_WORD(text, true_words) && is_choice(choices, "yes"))
		return "yes";
	return text;
}

const char *spell_bool(const char *text)
{
	if (IS_WORD(text, true_words))
		return "true";
	return IS_WORD(text, false_words) ? "false" : text;
}

/* The base of the number at *@at, which moves past the prefix. */
static int take_base(const char **at)
{
	for (size_t i = 0; i < sizeof(bases) / sizeof(bases[0]); i++) {
		size_t len = strlen(bases[i].prefix);

		if (strncasecmp(*at, bases[i].prefix, len) || !(*at)[len])
			continue;
		*at += len;
		return bases[i].base;
	}
	return 10;
}

/* Copy the digits, of any base, without the '_' between them. */
static bool copy_digits(char *out, size_t size, const char *text)
{
	size_t n = 0;

	for (; *text; text++) {
		if (*text == '_')
			continue;
		if (n + 1 == size || !strchr("0123456789abcdefABCDEF", *text))
			return false;
		out[n++] = *text;
	}
	out[n] = 0;
	return n;
}

const char *spell_int(char *out, size_t size, const char *text)
{
	const char *p = text + (*text == '-' || *text == '+');
	unsigned long long number;
	char digits[72], *end;
	int base;

	if (*p == '_')
		return NULL;
	base = take_base(&p);
	if (!copy_digits(digits, sizeof(digits), p))
		return NULL;
	errno = 0;
	number = strtoull(digits, &end, base);
	if (*end || errno)
		return NULL;
	(void)snprintf(out, size, "%s%llu", *text == '-' ? "-" : "", number);
	return out;
}

char *spell_path(const char *file, const char *text, bool name_too)
{
	const char *slash = strrchr(file, '/'), *home = getenv("HOME");
	char *path = NULL;
	int r;

	if (!strncmp(text, "~/", 2) && home)
		r = asprintf(&path, "%s%s", home, text + 1);
	else if (!*text || *text == '/' || !slash || (name_too && !strchr(text, '/')))
		return strdup(text);
	else
		r = asprintf(&path, "%.*s/%s", (int)(slash - file), file, text);
	return r < 0 ? NULL : path;
}
