#pragma once

#include <stddef.h>

/* The word of @words (@n of them) that @word was probably meant to be: fewest
 * edits (insert, delete, replace, swap of neighbours), '-' equal to '_', case
 * ignored, and no more edits than a third of the longer word. Failing that, the
 * only one that begins with @word, of three letters or more. NULL otherwise. */
const char *near_match(const char *word, const char *const *words, size_t n);
