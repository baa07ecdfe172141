#pragma once

struct program;
struct settings;

/* --dry-run: who would run where, and the variables that accel adds. Returns
 * the exit code. */
int rank_table_print(const struct settings *s, const struct program *p);
