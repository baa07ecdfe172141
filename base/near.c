/*
 * Guessing what was meant by a word that is not known. Edit distance over
 * letters; it knows nothing of what the words stand for.
 */

#include "base/near.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

enum {
	LONGEST = 64, /* words beyond this have no near one, which bounds the work */
	SHORTEST_PREFIX = 3,
};

static char fold(char c)
{
	return c == '_' ? '-' : (char)tolower((unsigned char)c);
}

static size_t min_size(size_t a, size_t b)
{
	return a < b ? a : b;
}

/*
 * Edits from @a to @b, or @limit + 1 as soon as it is clear that there are more.
 * Rows of the usual table: the one being filled and the two before it, the
 * older of which is what a swap of neighbours looks at.
 */
static size_t distance(const char *a, size_t a_len, const char *b, size_t b_len,
		       size_t limit)
{
	size_t table[3][LONGEST + 1];

	for (size_t j = 0; j <= b_len; j++)
		table[0][j] = j;
	for (size_t i = 1; i <= a_len; i++) {
		size_t *row = table[i % 3], *above = table[(i + 2) % 3];
		size_t *older = table[(i + 1) % 3], best = i;

		row[0] = i;
		for (size_t j = 1; j <= b_len; j++) {
			bool same = fold(a[i - 1]) == fold(b[j - 1]);
			size_t cost = min_size(above[j], row[j - 1]) + 1;

			cost = min_size(cost, above[j - 1] + !same);
			if (i > 1 && j > 1 && fold(a[i - 1]) == fold(b[j - 2]) &&
			    fold(a[i - 2]) == fold(b[j - 1]))
				cost = min_size(cost, older[j - 2] + 1);
			row[j] = cost;
			best = min_size(best, cost);
		}
		if (best > limit)
			return limit + 1;
	}
	return table[a_len % 3][b_len];
}

static bool begins_with(const char *text, const char *start)
{
	for (; *start; text++, start++)
		if (fold(*text) != fold(*start))
			return false;
	return true;
}

static const char *only_beginning(const char *word, const char *const *words, size_t n)
{
	const char *found = NULL;

	for (size_t i = 0; i < n; i++) {
		if (!begins_with(words[i], word))
			continue;
		if (found)
			return NULL;
		found = words[i];
	}
	return found;
}

const char *near_match(const char *word, const char *const *words, size_t n)
{
	size_t len = strnlen(word, LONGEST + 1), best = LONGEST;
	const char *found = NULL;

	if (!len || len > LONGEST)
		return NULL;
	for (size_t i = 0; i < n; i++) {
		size_t other = strnlen(words[i], LONGEST + 1);
		size_t longer = len > other ? len : other;
		size_t apart = longer - min_size(len, other), limit = longer / 3, d;

		if (other > LONGEST || apart > limit || apart >= best)
			continue;
		limit = min_size(limit, best - 1);
		d = distance(word, len, words[i], other, limit);
		if (d <= limit) {
			best = d;
			found = words[i];
		}
		if (!d)
			break;
	}
	if (!found && len >= SHORTEST_PREFIX)
		found = only_beginning(word, words, n);
	return found;
}
