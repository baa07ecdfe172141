#include "supervisor/env.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* The user's own value wins for these. */
static int add_unset(struct strv *out, const struct strv *user, const char *name,
		     int value)
{
	return strv_env_get(user, name) ? 0 : strv_addf(out, "%s=%d", name, value);
}

static int threads_of(const struct worker_env *w)
{
	int n = w->n_cores / (int)w->local_world;

	return n > 1 ? n : 1;
}

static int add_device(struct strv *out, const struct worker_env *w)
{
	if (!w->n_devices)
		return strv_add(out, "ACCEL_DEVICE=cpu");
	return strv_addf(out, "ACCEL_DEVICE=%s:%u", w->device_kind,
			 w->local_rank % (uint32_t)w->n_devices);
}

int env_additions(struct strv *out, const struct worker_env *w, const struct strv *user)
{
	const struct {
		const char *name;
		uint32_t value;
	} numbers[] = {
		{ "RANK", w->rank },
		{ "WORLD_SIZE", w->world },
		{ "LOCAL_RANK", w->local_rank },
		{ "LOCAL_WORLD_SIZE", w->local_world },
		{ "GROUP_RANK", w->node },
		{ "GROUP_WORLD_SIZE", w->n_nodes },
		{ "ROLE_RANK", w->rank },
		{ "ROLE_WORLD_SIZE", w->world },
		{ "MASTER_PORT", w->master_port },
		{ "TORCHELASTIC_RESTART_COUNT", w->attempt },
		{ "TORCHELASTIC_MAX_RESTARTS", 0 },
		{ "ACCEL_NODE", w->node },
		{ "ACCEL_ATTEMPT", w->attempt },
	};
	const struct {
		const char *name, *value;
	} texts[] = {
		{ "ROLE_NAME", "default" },
		{ "MASTER_ADDR", w->master_addr },
		{ "TORCHELASTIC_RUN_ID", w->job },
		{ "TORCHELASTIC_USE_AGENT_STORE", "True" },
		{ "TORCHELASTIC_ERROR_FILE", w->error_file },
		{ "ACCELERATE_MIXED_PRECISION", w->mixed_precision },
		{ "ACCELERATE_USE_CPU", w->n_devices ? "false" : "true" },
		{ "ACCEL_JOB", w->job },
		{ "ACCEL_MIXED_PRECISION", w->mixed_precision },
		{ "ACCEL_SOCKET", w->socket },
	};
	int r = 0;

	for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]) && !r; i++)
		r = strv_addf(out, "%s=%u", numbers[i].name, numbers[i].value);
	for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]) && !r; i++)
		r = strv_addf(out, "%s=%s", texts[i].name, texts[i].value);
	if (!r)
		r = add_device(out, w);
	if (!r && w->control_fd >= 0)
		r = strv_addf(out, "ACCEL_CONTROL_FD=%d", w->control_fd);
	if (!r && w->control_fd >= 0)
		r = strv_addf(out, "ACCEL_CONTROL_INO=%llu",
			      (unsigned long long)w->control_inode);
	if (!r)
		r = add_unset(out, user, "OMP_NUM_THREADS", threads_of(w));
	if (!r)
		r = add_unset(out, user, "TORCH_NCCL_ASYNC_ERROR_HANDLING", 1);
	if (!r)
		r = add_unset(out, user, "GLOO_ENABLE_STORE_V2_API", 1);
	return r;
}
