#include "cmd/settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/opt.h"
#include "base/own.h"
#include "base/path.h"
#include "cmd/cmd.h"

static const struct opt more_options[] = {
	{ .name = "config",
	  .arg = "FILE",
	  .aliases = "config-file",
	  .group = "Other",
	  .help = "Read this configuration file and no other",
	  .id = OPT_CONFIG },
	{ .name = "help",
	  .short_name = 'h',
	  .group = "Other",
	  .help = "Show this text",
	  .id = OPT_HELP },
};
enum { N_MORE = sizeof(more_options) / sizeof(more_options[0]) };

int settings_init(struct settings *s, struct err *err)
{
	*s = (struct settings){ .devices = { .kind = "cpu" } };
	return config_new(&s->config, err);
}

void settings_fini(struct settings *s)
{
	s->config = config_free(s->config);
}

size_t settings_options(struct opt *out, size_t max)
{
	size_t n = schema_options(out, max - N_MORE);

	for (size_t i = 0; i < N_MORE; i++)
		out[n + i] = more_options[i];
	return n + N_MORE;
}

int settings_option(struct settings *s, const struct opt *o, const char *value,
		    struct err *err)
{
	if (o->id < N_SETTINGS)
		return config_set_flag(s->config, (enum setting)o->id, o->name, value,
				       err);
	if (o->id == OPT_CONFIG)
		s->file = value;
	if (o->id == OPT_HELP)
		s->help = true;
	return 0;
}

static int load_file(struct settings *s, struct err *err)
{
	OWN_MEM char *cwd = s->file ? NULL : getcwd(NULL, 0);
	OWN_MEM char *found = NULL;
	int r;

	if (s->file)
		return config_load_file(s->config, s->file, err);
	/* A working folder that was removed has no file in it. */
	r = config_find_file(&found, cwd ? cwd : "/", environ, err);
	return r > 0 ? config_load_file(s->config, found, err) : r;
}

int settings_env(const struct settings *s, struct strv *out)
{
	const struct strv *set = config_list(s->config, SET_ENV);
	int r = strv_add_all(out, environ);

	for (size_t i = 0; i < set->n && !r; i++) {
		OWN_MEM char *name = strndup(set->v[i], strcspn(set->v[i], "="));

		r = name ? strv_env_set(out, name, strchr(set->v[i], '=') + 1) : -ENOMEM;
	}
	return r;
}

static int load_detected(struct settings *s, struct err *err)
{
	char count[16], what[200];
	struct strv env = { 0 };

	if (config_bool(s->config, SET_CPU) ||
	    (config_is_set(s->config, SET_NUM_PROCESSES) && !s->show_devices))
		return 0;
	/* What hides devices from the workers hides them from the count. */
	if (settings_env(s, &env) == 0 && env.v)
		s->devices = detect_devices("", env.v);
	strv_fini(&env);
	if (!s->devices.count)
		return 0;
	(void)snprintf(count, sizeof(count), "%d", s->devices.count);
	(void)snprintf(what, sizeof(what), "%s", s->devices.from);
	return config_set_detected(s->config, SET_NUM_PROCESSES, count, what, err);
}

int settings_finish(struct settings *s)
{
	const struct strv *warnings = config_warnings(s->config);
	struct err e = { 0 };
	int r = load_file(s, &e);

	if (!r)
		r = config_load_variables(s->config, environ, &e);
	for (size_t i = 0; i < warnings->n; i++)
		say_warning("%s", warnings->v[i]);
	if (r < 0) {
		say_error(e.text, "accel config show --origin tells where settings come "
				  "from; --config FILE reads another file.");
		return EXIT_CONFIG;
	}
	r = load_detected(s, &e);
	if (r < 0) {
		say_error(e.text, "");
		return EXIT_BUG;
	}
	return 0;
}

const char *settings_master_addr(void)
{
	struct buf text = { 0 };
	const char *addr = "127.0.0.1";

	if (path_read_file(&text, "/etc/hosts", 1 << 20, NULL) == 0 &&
	    memmem(buf_data(&text), buf_len(&text), "localhost", 9))
		addr = "localhost";
	buf_fini(&text);
	return addr;
}
