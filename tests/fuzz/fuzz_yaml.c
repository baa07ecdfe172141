/*
 * Configuration files of any bytes: loaded once alone and once under flags, and
 * then everything that can be asked of a configuration is asked.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "config/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What must hold whatever was loaded. */
static void check(const struct config *c)
{
	struct buf out = { 0 };

	for (size_t i = 0; i < N_SETTINGS; i++) {
		enum setting id = schema[i].id;
		long long n = config_int(c, id);

		if (schema[i].type == TYPE_INT && schema[i].def &&
		    (n < schema[i].min || n > schema[i].max))
			abort();
		for (size_t k = 0; k < config_list(c, id)->n; k++) {
			struct origin o = config_entry_origin(c, id, k);

			if (!strchr(config_list(c, id)->v[k], '=') ||
			    o.kind == ORIGIN_DEFAULT)
				abort();
		}
		if (config_print_value(&out, c, id) < 0 ||
		    config_print_origin(&out, c, id) < 0)
			abort();
	}
	buf_fini(&out);
}

static void load(const uint8_t *data, size_t size, int with_flags)
{
	struct err err = { 0 };
	struct config *c = NULL;
	int r;

	if (config_new(&c, &err) < 0)
		abort();
	if (with_flags && (config_set_flag(c, SET_ENV, NULL, "A=flag", &err) < 0 ||
			   config_set_flag(c, SET_GRACE, NULL, "1", &err) < 0))
		abort();
	r = config_load_yaml(c, "conf/f.yaml", (const char *)data, size, &err);
	/* A failure says where: the file's name and more. */
	if (r < 0 && strncmp(err.text, "conf/f.yaml", strlen("conf/f.yaml")))
		abort();
	if (r >= 0 && err.code)
		abort();
	check(c);
	config_free(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	load(data, size, 0);
	load(data, size, 1);
	return 0;
}
