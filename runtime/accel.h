#ifndef ACCEL_H
#define ACCEL_H

/*
 * libaccel: the companion runtime of a training program.
 *
 *     accel_world *world;
 *     accel_model *model;
 *
 *     accel_init(&world);
 *     accel_prepare(world, parameters, n, 0, &model);
 *     for (...) {
 *             ... forward and backward, into gradients[i] ...
 *             accel_backward(model, gradients);
 *             ... the optimizer's step ...
 *     }
 *     accel_finish(world);
 *
 * The program joins the processes that accel, torchrun, mpirun or srun started
 * on this machine. Started by hand it is a world of one, in which every call
 * works. No thread is started and no signal handler is installed.
 *
 * Collective calls are made by all ranks in the same order. They block until all
 * ranks have come; they compare what each rank wants before any data moves, so a
 * mismatch is an error on all of them. They wait at most ACCEL_TIMEOUT seconds
 * (environment; 1800) for a rank; one that dies or finishes is an error at once.
 * A rank that fails in the middle of a collective breaks the world: this and all
 * later collective calls return the error. After ACCEL_E_MISMATCH the world is
 * whole.
 *
 * Calls that can fail return 0 or a documented positive number, else one of enum
 * accel_error; accel_error() has the sentence. Memory belongs to the caller
 * unless said otherwise. A world is used by one thread at a time
 * (ACCEL_E_BUSY); any thread may be the one.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a call changes its meaning. */
#define ACCEL_ABI 1

typedef struct accel_world accel_world;
typedef struct accel_model accel_model;

enum accel_error {
	ACCEL_E_INVALID = -1,     /* an argument or the environment is wrong */
	ACCEL_E_MISMATCH = -2,    /* the ranks want different things; nothing moved */
	ACCEL_E_LOST = -3,        /* a rank died, failed or finished */
	ACCEL_E_TIMEOUT = -4,     /* a rank did not come in time */
	ACCEL_E_FORKED = -5,      /* called in a fork of the process that joined */
	ACCEL_E_OWNED = -6,       /* another process is this rank */
	ACCEL_E_VERSION = -7,     /* library and acceld are of different versions */
	ACCEL_E_UNREACHABLE = -8, /* no way to the other ranks from here */
	ACCEL_E_MEMORY = -9,
	ACCEL_E_BUSY = -10,       /* another thread is inside */
	ACCEL_E_INTERRUPTED = -11 /* the wait callback said so */
};

enum accel_dtype {
	ACCEL_FLOAT32 = 1,
	ACCEL_FLOAT64,
	ACCEL_FLOAT16,
	ACCEL_BFLOAT16, /* both 16-bit types are accumulated in float32 */
	ACCEL_INT8,
	ACCEL_UINT8,
	ACCEL_INT16,
	ACCEL_INT32,
	ACCEL_INT64,
	ACCEL_BOOL /* one byte; the sum is "or" */
};

/* ACCEL_MEAN is for floating types. */
enum accel_op { ACCEL_SUM = 1, ACCEL_MEAN, ACCEL_MIN, ACCEL_MAX };

enum { ACCEL_MAX_DIMS = 8 };

/* A dense array in row-major order. */
struct accel_array {
	void *data;
	int32_t dtype; /* enum accel_dtype */
	int32_t n_dims;
	uint64_t dims[ACCEL_MAX_DIMS];
};

/* ---- the world ------------------------------------------------------------ */

/*
 * Join. Blocks, where torchrun or another launcher started the processes, until
 * all ranks of the machine have come. A second call in a process returns the
 * same world. ACCEL_E_OWNED in a process that a rank started with its own
 * environment, ACCEL_E_UNREACHABLE where ranks run on other machines or behind
 * a container's wall, ACCEL_E_INVALID where only half of the variables are set.
 */
int accel_init(accel_world **ret);

/*
 * Leave. *Not* collective: ranks that still wait for this one get an error. Frees
 * the world, its models and its shared memory. NULL is fine.
 */
void accel_finish(accel_world *world);

/* Never block, never fail. */
int accel_rank(const accel_world *world);
int accel_size(const accel_world *world);
int accel_local_rank(const accel_world *world);
int accel_local_size(const accel_world *world);

/* "cpu", "cuda:1", ... as the supervisor assigned it; "cpu" without one. Belongs
 * to the library, for the life of the process. */
const char *accel_device(const accel_world *world);

/* "no", "fp16" or "bf16", as configured. Belongs to the library. */
const char *accel_mixed_precision(const accel_world *world);

/*
 * The last failure of a call in this thread, as a sentence or several lines that
 * say what was being done, what went wrong and what to do. Belongs to the
 * library, until the next failure in this thread.
 */
const char *accel_error(void);

/* ACCEL_ABI and the version, e.g. "0.1.0", of the library that is loaded. */
int accel_abi(void);
const char *accel_version(void);

/*
 * Have @on_wait called about ten times a second while a call of this process waits
 * for another rank, accel_init() too, and after each signal. When it returns other
 * than 0 the call gives up with ACCEL_E_INTERRUPTED. NULL removes it. @data is
 * passed on.
 */
void accel_on_wait(int (*on_wait)(void *data), void *data);

/* ---- collectives ---------------------------------------------------------- */

/* What the next collective call is about, in a few words: named in its errors, and
 * compared as shapes are. At most 47 bytes count; NULL for nothing. Does not block. */
void accel_label(accel_world *world, const char *label);

/* Wait until all ranks are here. */
int accel_barrier(accel_world *world);

/* Combine @array elementwise over all ranks, in place; all ranks hold the same
 * bits afterwards. Same dtype and dims everywhere. */
int accel_reduce(accel_world *world, const struct accel_array *array, int op);

/* Copy @array of @root into that of all others. Same dtype and dims everywhere. */
int accel_broadcast(accel_world *world, const struct accel_array *array, int root);

/*
 * Put the arrays of all ranks behind each other along dimension 0, in the order of
 * ranks, on every rank. dtype and the other dims are the same everywhere;
 * dimension 0 may differ, and be 0. An array without dimensions counts as one row.
 *
 * Two calls, since only the first tells how much memory the result needs:
 * accel_gather() sends and fills in rows[size], the rows of each rank;
 * accel_gather_into() must follow, with room for all rows, before any other
 * call; array->data stays as it is until then. @out may be NULL for a rank that does
 * not want the result.
 */
int accel_gather(accel_world *world, const struct accel_array *array, uint64_t *rows);
int accel_gather_into(accel_world *world, void *out);

/*
 * For a rank that has nothing to do while others still have: answer their
 * collective calls, adding nothing to them, until all ranks have called this. A
 * rank in here has no rows in a gather, is left out of a reduce and its mean,
 * and counts as zero in accel_backward(). A broadcast from it fails on the
 * others.
 */
int accel_join(accel_world *world);

/* ---- a model -------------------------------------------------------------- */

enum accel_prepare_flags {
	ACCEL_KEEP = 1 /* do not broadcast: parameters are the same already */
};

/*
 * Describe the parameters, in the same order on all ranks, and give all ranks
 * those of rank 0. Collective. The library keeps a copy of @parameters, not of
 * what they point at. ACCEL_E_INVALID where there are none.
 */
int accel_prepare(accel_world *world, const struct accel_array *parameters,
		  size_t n_parameters, int flags, accel_model **ret);

/* NULL is fine. Not collective. */
void accel_model_free(accel_model *model);

/*
 * Average gradients over all ranks, in place. gradients[i] has the dtype and dims
 * of parameter i; NULL means this rank has no gradient for it. Where no rank has
 * one, nothing happens. No two may share memory: a weight that is used twice is one
 * parameter. Collective.
 *
 * Returns 0 when done. A positive number means that other ranks have that many
 * gradients which are missing here: accel_missing() lists the parameters, in
 * ascending order; give each zeroed memory and call again, before any other call.
 * ACCEL_E_MISMATCH when the ranks prepared different parameters.
 */
int accel_backward(accel_model *model, void *const *gradients);

/* The list after accel_backward() returned a positive number. Belongs to the
 * model, until the next accel_backward(). */
const uint64_t *accel_missing(const accel_model *model);

/*
 * Memory for gradients which accel_backward() and accel_reduce() work on without
 * copying it. Zeroed, aligned to 64 bytes, owned by the world until
 * accel_finish(); forks of the process do not have it. Collective, with the same
 * @bytes everywhere. ACCEL_E_MEMORY where the ranks of this machine would not find
 * room for it.
 */
int accel_alloc(accel_world *world, uint64_t bytes, void **ret);

/* ---- 16-bit training ------------------------------------------------------ */

/* What to multiply the loss by so that small gradients survive in float16: 65536
 * at first, halved after an overflow, doubled after 2000 steps without. Only this
 * rank's view; all ranks that call accel_unscale() alike hold the same. */
double accel_loss_scale(const accel_model *model);

/*
 * After accel_backward(): divide the gradients by the loss scale. Returns 1, and
 * lowers the scale, when one of them is infinite or NaN: skip this optimizer step.
 * Gradients are equal everywhere by now, so all ranks decide the same. Does not
 * block.
 */
int accel_unscale(accel_model *model, void *const *gradients);

/* ---- supervision ---------------------------------------------------------- */

/* Count a step: the supervisor sees that the program moves. Does not block. */
void accel_step(accel_world *world);

/*
 * Was the job asked to end in order? 1 or 0, the same answer on every rank at the
 * same step. Collective: all ranks ask, each step or each nth.
 */
int accel_should_stop(accel_world *world);

/*
 * Report that this rank failed, and why, before anything else can hide it: the
 * supervisor shows @text as the first failure, and ranks that wait for this one
 * get it as their error. @text is UTF-8; what exceeds 64 KiB is cut. Does not
 * block; the program still has to end. @world may be NULL, where joining failed.
 */
void accel_fail(accel_world *world, const char *text);

/* ---- what was done -------------------------------------------------------- */

struct accel_count {
	uint64_t calls;
	uint64_t bytes; /* of this rank's own memory that took part */
};

struct accel_counters {
	struct accel_count barrier, reduce, broadcast, gather, backward;
	uint64_t steps;
};

/* Since accel_init(). Never fails. */
void accel_counters(const accel_world *world, struct accel_counters *ret);

#ifdef __cplusplus
}
#endif

#endif
