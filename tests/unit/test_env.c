#include "tests/unit/unit.h"

#include <string.h>

#include "base/contract.h"
#include "supervisor/env.h"

static const struct worker_env example = {
	.rank = 5,
	.world = 8,
	.local_rank = 1,
	.local_world = 4,
	.node = 1,
	.n_nodes = 2,
	.attempt = 3,
	.master_addr = "localhost",
	.master_port = 29500,
	.job = "job-1",
	.mixed_precision = "bf16",
	.device_kind = "cuda",
	.n_devices = 4,
	.n_cores = 10,
	.control_fd = 7,
	.control_inode = 99,
	.socket = "/run/accel/job-1.sock",
	.error_file = "/jobs/job-1/attempt-3/0-5.error.json",
};

static void assert_has(const struct strv *env, const char *name, const char *value)
{
	const char *got = strv_env_get(env, name);

	assert_non_null(got);
	assert_string_equal(got, value);
}

static void every_variable_has_the_meaning_torchrun_gives_it(void **state)
{
	static const char *const want[][2] = {
		{ "RANK", "5" },
		{ "WORLD_SIZE", "8" },
		{ "LOCAL_RANK", "1" },
		{ "LOCAL_WORLD_SIZE", "4" },
		{ "GROUP_RANK", "1" },
		{ "GROUP_WORLD_SIZE", "2" },
		{ "ROLE_RANK", "5" },
		{ "ROLE_WORLD_SIZE", "8" },
		{ "ROLE_NAME", "default" },
		{ "MASTER_ADDR", "localhost" },
		{ "MASTER_PORT", "29500" },
		{ "TORCHELASTIC_RESTART_COUNT", "3" },
		{ "TORCHELASTIC_MAX_RESTARTS", "0" },
		{ "TORCHELASTIC_RUN_ID", "job-1" },
		{ "TORCHELASTIC_USE_AGENT_STORE", "True" },
		{ "TORCHELASTIC_ERROR_FILE", "/jobs/job-1/attempt-3/0-5.error.json" },
		{ "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1" },
		{ "OMP_NUM_THREADS", "2" },
		{ "GLOO_ENABLE_STORE_V2_API", "1" },
		{ "ACCELERATE_MIXED_PRECISION", "bf16" },
		{ "ACCELERATE_USE_CPU", "false" },
		{ "ACCEL_JOB", "job-1" },
		{ "ACCEL_NODE", "1" },
		{ "ACCEL_ATTEMPT", "3" },
		{ "ACCEL_DEVICE", "cuda:1" },
		{ "ACCEL_MIXED_PRECISION", "bf16" },
		{ "ACCEL_CONTROL_FD", "7" },
		{ "ACCEL_CONTROL_INO", "99" },
		{ "ACCEL_SOCKET", "/run/accel/job-1.sock" },
	};
	struct strv user = { 0 }, env = { 0 };

	(void)state;
	assert_int_equal(env_additions(&env, &example, &user), 0);
	for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++)
		assert_has(&env, want[i][0], want[i][1]);
	assert_int_equal(env.n, sizeof(want) / sizeof(want[0]));
	strv_fini(&env);
}

static void without_an_accelerator_accelerate_is_told_to_use_the_cpu(void **state)
{
	struct worker_env w = example;
	struct strv user = { 0 }, env = { 0 };

	(void)state;
	w.n_devices = 0;
	w.device_kind = "cpu";
	assert_int_equal(env_additions(&env, &w, &user), 0);
	assert_has(&env, "ACCELERATE_USE_CPU", "true");
	assert_has(&env, "ACCEL_DEVICE", "cpu");
	strv_fini(&env);
}

static void what_the_user_set_wins_where_accel_only_fills_in(void **state)
{
	static const char *const names[] = { "OMP_NUM_THREADS",
					     "GLOO_ENABLE_STORE_V2_API",
					     "TORCH_NCCL_ASYNC_ERROR_HANDLING" };
	struct strv user = { 0 }, env = { 0 };

	(void)state;
	for (int i = 0; i < 3; i++)
		assert_int_equal(strv_env_set(&user, names[i], "0"), 0);
	assert_int_equal(env_additions(&env, &example, &user), 0);
	for (int i = 0; i < 3; i++)
		assert_null(strv_env_get(&env, names[i]));
	strv_fini(&env);
	strv_fini(&user);
}

static void more_workers_than_cores_still_get_a_thread_each(void **state)
{
	struct worker_env w = example;
	struct strv user = { 0 }, env = { 0 };

	(void)state;
	w.n_cores = 2;
	assert_int_equal(env_additions(&env, &w, &user), 0);
	assert_has(&env, "OMP_NUM_THREADS", "1");
	strv_fini(&env);
}

static void what_describes_a_job_never_passes_from_outside(void **state)
{
	struct strv user = { 0 }, env = { 0 };

	(void)state;
	assert_int_equal(env_additions(&env, &example, &user), 0);
	for (size_t i = 0; i < env.n; i++) {
		if (!strncmp(env.v[i], "OMP_", 4) || !strncmp(env.v[i], "GLOO_", 5) ||
		    !strncmp(env.v[i], "TORCH_", 6))
			assert_false(contract_has(env.v[i]));
		else
			assert_true(contract_has(env.v[i]));
	}
	strv_fini(&env);
	assert_false(contract_has("RANKS=1"));
	assert_false(contract_has("RAN=1"));
	assert_false(contract_has("ACCEL_NUM_PROCESSES=4"));
	assert_false(contract_has("=x"));
	assert_false(contract_has(""));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_variable_has_the_meaning_torchrun_gives_it),
		cmocka_unit_test(
			without_an_accelerator_accelerate_is_told_to_use_the_cpu),
		cmocka_unit_test(what_the_user_set_wins_where_accel_only_fills_in),
		cmocka_unit_test(more_workers_than_cores_still_get_a_thread_each),
		cmocka_unit_test(what_describes_a_job_never_passes_from_outside),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
