/* Which rank a process is, for every kind of environment that a launcher, or a person,
 * gives it. */

/* Before cmocka, whose fail() is a macro. */
#include "runtime/world.h"

#include "tests/unit/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum { MAX_VARIABLES = 12 };

static void set_environment(const char *const *variables)
{
	assert_int_equal(clearenv(), 0);
	for (; *variables; variables++) {
		char text[256], *value;

		(void)snprintf(text, sizeof(text), "%s", *variables);
		value = strchr(text, '=');
		assert_non_null(value);
		*value++ = 0;
		assert_int_equal(setenv(text, value, 1), 0);
	}
}

/* ---- what is understood ----------------------------------------------------------- */

#define TORCHRUN(rank, size, local_rank, local_size)                                     \
	"RANK=" rank, "WORLD_SIZE=" size, "LOCAL_RANK=" local_rank,                      \
		"LOCAL_WORLD_SIZE=" local_size
#define ACCEL "ACCEL_JOB=j1", "TORCHELASTIC_RUN_ID=j1"
#define MPIRUN(rank, size, local_rank, local_size)                                       \
	"OMPI_COMM_WORLD_RANK=" rank, "OMPI_COMM_WORLD_SIZE=" size,                      \
		"OMPI_COMM_WORLD_LOCAL_RANK=" local_rank,                                \
		"OMPI_COMM_WORLD_LOCAL_SIZE=" local_size
#define HYDRA(rank, size, local_rank, local_size)                                        \
	"PMI_RANK=" rank, "PMI_SIZE=" size, "MPI_LOCALRANKID=" local_rank,               \
		"MPI_LOCALNRANKS=" local_size
#define SRUN(rank, size, local_rank, nodes)                                              \
	"SLURM_PROCID=" rank, "SLURM_STEP_NUM_TASKS=" size, "SLURM_LOCALID=" local_rank, \
		"SLURM_STEP_NUM_NODES=" nodes, "SLURM_STEP_ID=0", "SLURM_JOB_ID=77"

static const struct understood {
	const char *what;
	const char *env[MAX_VARIABLES];
	struct identity id;
} understood[] = {
	{ "nothing at all", { 0 }, { 0, 1, 0, 1, NULL } },
	{ "something else", { "HOME=/", "LOCAL_RANK=3" }, { 0, 1, 0, 1, NULL } },
	{ "empty variables",
	  { "RANK=", "WORLD_SIZE=", "LOCAL_RANK=", "LOCAL_WORLD_SIZE=" },
	  { 0, 1, 0, 1, NULL } },
	{ "accel", { TORCHRUN("1", "3", "1", "3"), ACCEL }, { 1, 3, 1, 3, "accel" } },
	{ "accel, alone",
	  { TORCHRUN("0", "1", "0", "1"), ACCEL },
	  { 0, 1, 0, 1, "accel" } },
	{ "torchrun",
	  { TORCHRUN("2", "4", "2", "4"), "MASTER_PORT=1" },
	  { 2, 4, 2, 4, "torchrun" } },
	{ "torchrun on two machines",
	  { TORCHRUN("5", "8", "1", "4"), "MASTER_ADDR=node0" },
	  { 5, 8, 1, 4, "torchrun" } },
	{ "torchrun inside of accel",
	  { TORCHRUN("1", "2", "1", "2"), "ACCEL_JOB=j1", "TORCHELASTIC_RUN_ID=none" },
	  { 1, 2, 1, 2, "torchrun" } },
	{ "an empty ACCEL_JOB is none",
	  { TORCHRUN("1", "2", "1", "2"), "ACCEL_JOB=", "TORCHELASTIC_RUN_ID=" },
	  { 1, 2, 1, 2, "torchrun" } },
	{ "mpirun", { MPIRUN("3", "4", "1", "2") }, { 3, 4, 1, 2, "mpirun" } },
	{ "mpiexec of hydra", { HYDRA("1", "2", "1", "2") }, { 1, 2, 1, 2, "hydra" } },
	{ "srun", { SRUN("1", "2", "1", "1") }, { 1, 2, 1, 2, "srun" } },
	{ "srun on two machines", { SRUN("3", "4", "1", "2") }, { 3, 4, 1, 2, "srun" } },
	{ "srun that does not say how many machines",
	  { "SLURM_PROCID=1", "SLURM_STEP_NUM_TASKS=2", "SLURM_LOCALID=1",
	    "SLURM_STEP_ID=0" },
	  { 1, 2, 1, 2, "srun" } },
	{ "a batch script of Slurm, outside of a step",
	  { "SLURM_PROCID=0", "SLURM_NTASKS=8", "SLURM_LOCALID=0", "SLURM_JOB_ID=77" },
	  { 0, 1, 0, 1, NULL } },
	{ "a batch script with a stale step",
	  { "SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=8", "SLURM_LOCALID=0" },
	  { 0, 1, 0, 1, NULL } },
	{ "mpirun inside of accel, which started one process",
	  { TORCHRUN("0", "1", "0", "1"), ACCEL, MPIRUN("1", "2", "1", "2") },
	  { 1, 2, 1, 2, "mpirun" } },
	{ "accel inside of mpirun, which started one process",
	  { TORCHRUN("1", "2", "1", "2"), ACCEL, MPIRUN("0", "1", "0", "1") },
	  { 1, 2, 1, 2, "accel" } },
	{ "of two that started several the first counts",
	  { TORCHRUN("1", "2", "1", "2"), ACCEL, MPIRUN("3", "4", "3", "4") },
	  { 1, 2, 1, 2, "accel" } },
	{ "half of mpirun's variables are none",
	  { "OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2" },
	  { 0, 1, 0, 1, NULL } },
	{ "by hand", { "RANK=1", "WORLD_SIZE=2" }, { 1, 2, 1, 2, "hand" } },
	{ "by hand, alone", { "RANK=0", "WORLD_SIZE=1" }, { 0, 1, 0, 1, "hand" } },
	{ "by hand, with an address of this machine",
	  { "RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1" },
	  { 1, 2, 1, 2, "hand" } },
	{ "by hand, with the address of IPv6",
	  { "RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=::1" },
	  { 1, 2, 1, 2, "hand" } },
	{ "by hand, with its name",
	  { "RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=localhost", "LOCAL_RANK=1" },
	  { 1, 2, 1, 2, "hand" } },
	{ "by hand, elsewhere: only this one is known to be here",
	  { "RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=node0" },
	  { 1, 2, 0, 1, "hand" } },
	{ "by hand, elsewhere, with all four",
	  { TORCHRUN("5", "8", "1", "4"), "MASTER_ADDR=node0" },
	  { 5, 8, 1, 4, "torchrun" } },
	{ "as many as there can be",
	  { TORCHRUN("1023", "1024", "1023", "1024") },
	  { 1023, 1024, 1023, 1024, "torchrun" } },
};

static void assert_same(const char *what, const struct identity *got,
			const struct identity *want)
{
	const char *launcher = got->launcher ? got->launcher : "none";

	if (got->rank != want->rank || got->size != want->size ||
	    got->local_rank != want->local_rank || got->local_size != want->local_size ||
	    strcmp(launcher, want->launcher ? want->launcher : "none") != 0)
		fail_msg("%s: rank %d of %d, local rank %d of %d by %s", what, got->rank,
			 got->size, got->local_rank, got->local_size, launcher);
}

static void a_rank_is_told_from_the_variables_of_its_launcher(void **state)
{
	(void)state;
	for (size_t i = 0; i < COUNT(understood); i++) {
		struct identity id = { 0 };

		set_environment(understood[i].env);
		if (identity_read(&id) != 0)
			fail_msg("%s: %s", understood[i].what, accel_error());
		assert_same(understood[i].what, &id, &understood[i].id);
	}
}

/* ---- what is refused -------------------------------------------------------------- */

static const struct refused {
	const char *env[MAX_VARIABLES];
	const char *text[3]; /* in the sentence */
} refused[] = {
	{ { "RANK=1" }, { "RANK is set", "WORLD_SIZE is not", "env -u RANK" } },
	{ { "WORLD_SIZE=2" },
	  { "WORLD_SIZE is set", "RANK is not", "env -u WORLD_SIZE" } },
	{ { "RANK=1", "WORLD_SIZE=" }, { "WORLD_SIZE is not" } },
	{ { "RANK=", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2" },
	  { "RANK is not" } },
	{ { "RANK=one", "WORLD_SIZE=2" }, { "RANK is \"one\"" } },
	{ { "RANK=1", "WORLD_SIZE=2x" }, { "WORLD_SIZE is \"2x\"" } },
	{ { "RANK=-1", "WORLD_SIZE=2" }, { "RANK is \"-1\"" } },
	{ { "RANK=1.0", "WORLD_SIZE=2" }, { "RANK is \"1.0\"" } },
	{ { "RANK=0x1", "WORLD_SIZE=2" }, { "RANK is \"0x1\"" } },
	{ { "RANK=1", "WORLD_SIZE=4294967298" }, { "WORLD_SIZE is \"4294967298\"" } },
	{ { "RANK=99999999999999999999", "WORLD_SIZE=2" }, { "RANK is \"9999" } },
	{ { "RANK= ", "WORLD_SIZE=2" }, { "RANK is \" \"" } },
	{ { TORCHRUN("0", "2", "zero", "2") }, { "LOCAL_RANK is \"zero\"" } },
	{ { TORCHRUN("0", "2", "0", ""), "LOCAL_WORLD_SIZE=two" },
	  { "LOCAL_WORLD_SIZE is \"two\"" } },
	{ { "RANK=2", "WORLD_SIZE=2" }, { "rank 2 in a world of 2" } },
	{ { "RANK=0", "WORLD_SIZE=0" }, { "world of 0" } },
	{ { TORCHRUN("2", "2", "0", "2") }, { "rank 2 in a world of 2", "torchrun" } },
	{ { TORCHRUN("0", "2", "2", "2") }, { "local rank 2 of 2", "torchrun" } },
	{ { TORCHRUN("0", "2", "0", "0") }, { "local rank 0 of 0" } },
	{ { TORCHRUN("0", "2", "0", "3") }, { "local rank 0 of 3", "world of 2" } },
	{ { TORCHRUN("0", "2", "2", "2"), ACCEL }, { "local rank 2 of 2", "accel" } },
	{ { MPIRUN("4", "4", "0", "4") }, { "rank 4 in a world of 4", "mpirun" } },
	{ { MPIRUN("0", "4", "x", "4") }, { "OMPI_COMM_WORLD_LOCAL_RANK is \"x\"" } },
	{ { HYDRA("4", "4", "0", "4") }, { "rank 4 in a world of 4", "hydra" } },
	{ { SRUN("4", "4", "0", "1") }, { "rank 4 in a world of 4", "srun" } },
	{ { TORCHRUN("0", "1025", "0", "1025") }, { "1025 ranks", "1024" } },
	{ { "RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=node0" },
	  { "LOCAL_WORLD_SIZE is not" } },
};

static void what_makes_no_sense_is_refused_in_words(void **state)
{
	(void)state;
	for (size_t i = 0; i < COUNT(refused); i++) {
		struct identity id;

		set_environment(refused[i].env);
		if (identity_read(&id) != ACCEL_E_INVALID)
			fail_msg("%s, ... was not refused", refused[i].env[0]);
		for (int t = 0; t < 3 && refused[i].text[t]; t++)
			if (!strstr(accel_error(), refused[i].text[t]))
				fail_msg("%s, ...: \"%s\" does not say \"%s\"",
					 refused[i].env[0], accel_error(),
					 refused[i].text[t]);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(a_rank_is_told_from_the_variables_of_its_launcher),
		cmocka_unit_test(what_makes_no_sense_is_refused_in_words),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
