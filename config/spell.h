#pragma once

/*
 * What YAML 1.1 reads into a scalar without quotes: null, booleans, numbers. Each
 * function turns such a spelling into the one that value.c checks; a text that is
 * none of them comes back as it is, for value.c to refuse in its own words.
 */

#include <stdbool.h>
#include <stddef.h>

/* Nothing, "~" or "null". */
bool spell_is_null(const char *text);

/* "no" unquoted is a boolean to YAML, and null is one way to say no: whichever of
 * @choices ("no|fp16|bf16") is meant. */
const char *spell_choice(const char *choices, const char *text);

/* "true" or "false". */
const char *spell_bool(const char *text);

/* 0x10, 0o10 or 010, 0b10, 1_000 and +4 in plain decimal, written to @out. NULL
 * for what is no whole number so spelled, 08 too: a number to some readers of
 * YAML and text to others. */
const char *spell_int(char *out, size_t size, const char *text);

/* A path in @file, allocated: relative to the file's folder, so that it means the
 * same wherever accel is started, and "~/" the home folder. With @name_too, a
 * word without a slash is a name to look up and stays. NULL without memory. */
char *spell_path(const char *file, const char *text, bool name_too);
