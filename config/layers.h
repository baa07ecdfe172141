#pragma once

/* Inside config/: how a configuration is kept, for the files that fill it. */

#include "config/arena.h"
#include "config/config.h"

enum { N_ORIGINS = ORIGIN_FLAG + 1 };

/* A value by its row's type: a number (also a boolean, or milliseconds) or text. */
struct value {
	long long number;
	const char *text;
};

struct slot {
	bool set;
	struct value value;
	struct origin origin;
};

/* Entries "NAME=VALUE" of a MAP, merged over the layers, and where each is from. */
struct map {
	struct strv list;
	struct origin *origins;
	size_t cap;
};

struct config {
	struct arena arena; /* texts of values and names of origins */
	struct slot slots[N_SETTINGS][N_ORIGINS];
	struct map maps[N_SETTINGS];
	struct strv warnings;
};

/* Check @text against @row; the value's text is allocated on @arena. The error
 * says what is wrong and what is allowed, not where. */
int value_parse(struct value *ret, struct arena *arena, const struct setting_row *row,
		const char *text, struct err *err);

/* -EINVAL, with "'TEXT' WHAT; allowed: ..." */
int value_refuse(const struct setting_row *row, const char *text, const char *what,
		 struct err *err);

/* Check what may be a variable of the workers. */
int value_check_entry(const char *name, const char *value, struct err *err);

/* Set @id in the layer of @origin, whose name must live as long as @c. For a MAP,
 * @text is one entry. */
int config_put(struct config *c, enum setting id, const char *text, struct origin origin,
	       struct err *err);

/* Entries of a file, each name once, under what higher layers have; takes all that
 * @entries owns. */
int config_put_entries(struct config *c, enum setting id, struct map *entries);

/* Append to @m alone. Returns 0 or -ENOMEM. */
int map_add(struct map *m, const char *entry, struct origin origin);
void map_fini(struct map *m);
