#include "cmd/rank_table.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/own.h"
#include "base/strv.h"
#include "cmd/cmd.h"
#include "cmd/program.h"
#include "cmd/python_path.h"
#include "cmd/settings.h"
#include "supervisor/env.h"

/* Chosen when the job starts; shown as names. */
static const char *const later[][2] = {
	{ "ACCEL_JOB", "(the job's id)" },
	{ "ACCEL_SOCKET", "(the job's socket)" },
	{ "TORCHELASTIC_RUN_ID", "(the job's id)" },
	{ "TORCHELASTIC_ERROR_FILE", "(in the job's folder)" },
	{ "ACCEL_CONTROL_FD", "(a descriptor)" },
	{ "ACCEL_CONTROL_INO", "(its inode)" },
};

static struct worker_env env_of(const struct settings *s, uint32_t rank, uint32_t n)
{
	return (struct worker_env){
		.rank = rank,
		.world = n,
		.local_rank = rank,
		.local_world = n,
		.n_nodes = 1,
		.master_addr = settings_master_addr(),
		.master_port = (uint32_t)config_int(s->config, SET_MASTER_PORT),
		.job = "",
		.mixed_precision = config_str(s->config, SET_MIXED_PRECISION),
		.device_kind = s->devices.kind,
		.n_devices = s->devices.count,
		.n_cores = detect_cores(""),
		.control_fd = 0,
		.socket = "",
		.error_file = "",
	};
}

static void print_variable(struct buf *out, const char *entry)
{
	size_t len = strcspn(entry, "=");

	for (size_t i = 0; i < sizeof(later) / sizeof(later[0]); i++)
		if (!strncmp(later[i][0], entry, len) && !later[i][0][len]) {
			(void)buf_addf(out, "    %s=%s\n", later[i][0], later[i][1]);
			return;
		}
	if (!strcmp(entry, "MASTER_PORT=0"))
		entry = "MASTER_PORT=(a free port)";
	(void)buf_addf(out, "    %s\n", entry);
}

/* "PYTHONPATH=$PYTHONPATH:FOLDER" or less of it, or "": what it holds already is not
 * shown. The caller frees it. */
static char *python_path_line(const struct program *p, struct strv *user)
{
	OWN_MEM char *folder = p->is_python ? python_path_folder() : NULL;
	const char *old = strv_env_get(user, "PYTHONPATH");
	const char *before = old && *old ? "$PYTHONPATH:" : "";
	char *line = NULL;

	if (python_path_add(user, folder) <= 0)
		return strdup("");
	return asprintf(&line, "    PYTHONPATH=%s%s\n", before, folder) < 0 ? NULL : line;
}

static void print_argv(struct buf *out, const struct program *p)
{
	(void)buf_addf(out, "program: %s\n", p->path);
	for (size_t i = 0; i < p->argv.n; i++)
		(void)buf_addf(out, "  argv[%zu]: %s\n", i, p->argv.v[i]);
}

int rank_table_print(const struct settings *s, const struct program *p)
{
	uint32_t n = (uint32_t)config_int(s->config, SET_NUM_PROCESSES);
	struct strv user = { 0 };
	struct buf out = { 0 };
	OWN_MEM char *python_path = NULL;

	(void)settings_env(s, &user);
	python_path = python_path_line(p, &user);
	print_argv(&out, p);
	(void)buf_addf(&out,
		       "1 node x %u = %u process%s\n\n  rank  node  local rank  device\n",
		       n, n, n == 1 ? "" : "es");
	for (uint32_t i = 0; i < n; i++) {
		int count = s->devices.count;

		(void)buf_addf(&out, "  %4u  %4u  %10u  %s", i, 0, i,
			       count ? s->devices.kind : "cpu");
		(void)(count ? buf_addf(&out, ":%u\n", i % (uint32_t)count)
			     : buf_add_str(&out, "\n"));
	}
	for (uint32_t i = 0; i < n; i++) {
		struct worker_env w = env_of(s, i, n);
		struct strv added = { 0 };

		(void)env_additions(&added, &w, &user);
		(void)buf_addf(&out, "\n  rank %u is given\n", i);
		for (size_t k = 0; k < added.n; k++)
			print_variable(&out, added.v[k]);
		(void)buf_add_str(&out, python_path ? python_path : "");
		strv_fini(&added);
	}
	strv_fini(&user);
	return print_out(&out);
}
