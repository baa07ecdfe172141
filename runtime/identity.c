/* Which rank this process is, from the variables of the launcher that started it. */

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/world.h"

/* A launcher is believed when all its variables are there; the first one counts. */
static const struct launcher {
	const char *name;
	const char *rank, *size, *local_rank, *local_size;
	const char *also; /* must be set too, or NULL */
} launchers[] = {
	{ "accel", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCEL_JOB" },
	{ "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", NULL },
	{ "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
	  "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", NULL },
	{ "hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL },
	/* Its local size is told apart below. In a batch script, outside of a step,
	 * there is one process, whatever the job's size. */
	{ "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
	  "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID" },
};

static bool is_set(const char *name)
{
	const char *value = getenv(name);

	return value && *value;
}

/* -EINVAL unless it is a number from 0 to INT_MAX. */
static int number_of(const char *name, int *ret)
{
	const char *text = getenv(name);
	char *end;
	long n;

	errno = 0;
	n = strtol(text, &end, 10);
	if (errno || *end || end == text || n < 0 || n > INT_MAX)
		return fail(ACCEL_E_INVALID, "%s is \"%s\", which is no number of a rank",
			    name, text);
	*ret = (int)n;
	return 0;
}

static int check(const struct identity *id)
{
	if (id->size < 1 || id->rank >= id->size)
		return fail(ACCEL_E_INVALID, "rank %d in a world of %d (set by %s)",
			    id->rank, id->size, id->launcher);
	if (id->local_size < 1 || id->local_rank >= id->local_size ||
	    id->local_size > id->size)
		return fail(ACCEL_E_INVALID,
			    "local rank %d of %d on this machine, in a world of %d (set "
			    "by %s)",
			    id->local_rank, id->local_size, id->size, id->launcher);
	if (id->local_size > MAX_LOCAL_RANKS)
		return fail(ACCEL_E_INVALID,
			    "%d ranks on this machine, where at most %d can be",
			    id->local_size, MAX_LOCAL_RANKS);
	return 0;
}

static bool is_local_name(const char *host)
{
	return !host || !*host || strcmp(host, "localhost") == 0 ||
	       strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0;
}

/* Only RANK and WORLD_SIZE, as people set them by hand. */
static int read_by_hand(struct identity *id)
{
	int r = number_of("RANK", &id->rank);

	if (!r)
		r = number_of("WORLD_SIZE", &id->size);
	if (r < 0)
		return r;
	id->launcher = "hand";
	id->local_rank = id->rank;
	id->local_size = id->size;
	if (is_set("LOCAL_RANK") && is_set("LOCAL_WORLD_SIZE") == false &&
	    !is_local_name(getenv("MASTER_ADDR")))
		return fail(
			ACCEL_E_INVALID,
			"LOCAL_RANK is set and LOCAL_WORLD_SIZE is not: set it to the "
			"number of processes on this machine");
	if (!is_local_name(getenv("MASTER_ADDR"))) {
		id->local_rank = 0;
		id->local_size = 1;
	}
	return check(id);
}

static int read_launcher(struct identity *id, const struct launcher *l)
{
	const char *nodes = getenv("SLURM_STEP_NUM_NODES");
	int r = number_of(l->rank, &id->rank);

	if (!r)
		r = number_of(l->size, &id->size);
	if (!r)
		r = number_of(l->local_rank, &id->local_rank);
	if (!r)
		r = number_of(l->local_size, &id->local_size);
	if (r < 0)
		return r;
	id->launcher = l->name;
	if (strcmp(l->name, "srun") == 0 && nodes && strcmp(nodes, "1") != 0)
		id->local_size = id->local_rank + 1; /* elsewhere too; nobody asks here */
	return check(id);
}

static bool is_started_by(const struct launcher *l)
{
	const char *job = getenv("ACCEL_JOB"), *run = getenv("TORCHELASTIC_RUN_ID");

	if (!is_set(l->rank) || !is_set(l->size) || !is_set(l->local_rank) ||
	    !is_set(l->local_size) || (l->also && !is_set(l->also)))
		return false;
	/* A torchrun inside of a job of accel has set its own. */
	return strcmp(l->name, "accel") != 0 || (run && strcmp(job, run) == 0);
}

/* Launchers may be nested; one that started a single process says nothing. */
static const struct launcher *find_launcher(void)
{
	const struct launcher *found = NULL;

	for (size_t i = 0; i < sizeof(launchers) / sizeof(launchers[0]); i++) {
		const struct launcher *l = &launchers[i];

		if (!is_started_by(l))
			continue;
		if (strcmp(getenv(l->size), "1") != 0)
			return l;
		found = found ? found : l;
	}
	return found;
}

int identity_read(struct identity *ret)
{
	const struct launcher *l = find_launcher();

	*ret = (struct identity){ .size = 1, .local_size = 1 };
	if (l)
		return read_launcher(ret, l);
	if (is_set("RANK") && is_set("WORLD_SIZE"))
		return read_by_hand(ret);
	if (is_set("RANK") || is_set("WORLD_SIZE"))
		return fail(ACCEL_E_INVALID,
			    "%s is set and %s is not: a launcher sets both; to run one "
			    "process by itself, unset it (env -u %s)",
			    is_set("RANK") ? "RANK" : "WORLD_SIZE",
			    is_set("RANK") ? "WORLD_SIZE" : "RANK",
			    is_set("RANK") ? "RANK" : "WORLD_SIZE");
	return 0;
}
