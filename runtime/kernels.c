/*
 * Arithmetic over arrays of every dtype. Blocks of elements are accumulated in the
 * first-level cache, in float for the 16-bit types, so a destination may be one of
 * the sources. The loops are plain: compilers vectorise them.
 */

#include <math.h>
#include <string.h>

#include "runtime/world.h"

/*
 * The same source for several processors, chosen when the library is loaded.
 * Sanitizers are not ready yet by then.
 */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(ACCEL_SANITIZED)
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CLONES
#endif

enum { BLOCK = 1024 };

/* ---- 16-bit types ------------------------------------------------------------------ */

static inline float bits_to_float(uint32_t bits)
{
	float f;

	memcpy(&f, &bits, sizeof(f));
	return f;
}

static inline uint32_t float_to_bits(float f)
{
	uint32_t bits;

	memcpy(&bits, &f, sizeof(bits));
	return bits;
}

static inline float bfloat16_to_float(uint16_t h)
{
	return bits_to_float((uint32_t)h << 16);
}

/* Round to nearest, ties to even. */
static inline uint16_t float_to_bfloat16(float f)
{
	uint32_t bits = float_to_bits(f);
	uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
	uint32_t nan = (bits >> 16) | 0x40;

	return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static inline float float16_to_float(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16;
	uint32_t rest = (uint32_t)(h & 0x7fff) << 13;
	/* The exponents' biases differ by 112; the product also scales subnormals. */
	float scaled = bits_to_float(rest) * 0x1p112f;
	uint32_t bits =
		(h & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : float_to_bits(scaled);

	return bits_to_float(bits | sign);
}

/* Round to nearest, ties to even; too large becomes infinite. */
static inline uint16_t float_to_float16(float f)
{
	uint32_t bits = float_to_bits(f), sign = (bits >> 16) & 0x8000;
	uint32_t magnitude = bits & 0x7fffffff;
	/* Normal: drop 13 bits of the mantissa, with rounding. */
	uint32_t normal =
		(magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
	/* Subnormal: let the addition of a large number do the rounding. */
	uint32_t small = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000;
	uint32_t huge = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
	uint32_t half = magnitude < (113u << 23) ? small : normal;

	/* 65520 and more round to infinity. */
	return (uint16_t)(sign | (magnitude >= 0x477ff000 ? huge : half));
}

/* ---- sums, minima, maxima -------------------------------------------------------------
 */

#define SUM(a, b) ((a) + (b))
/* NaN wins, as in torch. */
#define MIN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define MAX(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define OR(a, b) ((a) | (b))
#define PLAIN(x) (x)

/* acc OP= source, for one block. */
#define DEFINE_FOLD(name, type, acc_type, load, OP)                                      \
	CLONES static void name(acc_type *acc, const void *source, size_t n)             \
	{                                                                                \
		const type *s = source;                                                  \
                                                                                         \
		for (size_t i = 0; i < n; i++) {                                         \
			acc_type x = load(s[i]);                                         \
                                                                                         \
			acc[i] = (acc_type)OP(acc[i], x);                                \
		}                                                                        \
	}

#define DEFINE_LOAD(name, type, acc_type, load)                                          \
	CLONES static void name(acc_type *acc, const void *source, size_t n)             \
	{                                                                                \
		const type *s = source;                                                  \
                                                                                         \
		for (size_t i = 0; i < n; i++)                                           \
			acc[i] = load(s[i]);                                             \
	}

#define DEFINE_STORE(name, type, acc_type, store)                                        \
	CLONES static void name(void *to, const acc_type *acc, size_t n)                 \
	{                                                                                \
		type *t = to;                                                            \
                                                                                         \
		for (size_t i = 0; i < n; i++)                                           \
			t[i] = store(acc[i]);                                            \
	}

#define DEFINE_SCALE(name, acc_type)                                                     \
	CLONES static void name(acc_type *acc, size_t n, acc_type factor)                \
	{                                                                                \
		for (size_t i = 0; i < n; i++)                                           \
			acc[i] *= factor;                                                \
	}

/* A whole combination: block by block through an accumulator. */
#define DEFINE_COMBINE(name, type, acc_type, is_scaled)                                  \
	static void combine_##name(int op, void *const *to, int n_to,                    \
				   const void *const *sources, int n, size_t count,      \
				   double factor)                                        \
	{                                                                                \
		void (*const fold)(acc_type *, const void *, size_t) =                   \
			op == ACCEL_MIN   ? min_##name                                   \
			: op == ACCEL_MAX ? max_##name                                   \
					  : sum_##name;                                  \
		_Alignas(CACHE_LINE) acc_type acc[BLOCK];                                \
                                                                                         \
		for (size_t at = 0; at < count; at += BLOCK) {                           \
			size_t len = count - at < BLOCK ? count - at : BLOCK;            \
                                                                                         \
			load_##name(acc, (const type *)sources[0] + at, len);            \
			for (int i = 1; i < n; i++)                                      \
				fold(acc, (const type *)sources[i] + at, len);           \
			if (is_scaled && (op == ACCEL_SUM || op == ACCEL_MEAN) &&        \
			    factor != 1.0)                                               \
				scale_##name(acc, len, (acc_type)factor);                \
			for (int i = 0; i < n_to; i++)                                   \
				store_##name((type *)to[i] + at, acc, len);              \
		}                                                                        \
	}

#define DEFINE_DTYPE(name, type, acc_type, load, store, ADD, is_scaled)                  \
	DEFINE_LOAD(load_##name, type, acc_type, load)                                   \
	DEFINE_STORE(store_##name, type, acc_type, store)                                \
	DEFINE_FOLD(sum_##name, type, acc_type, load, ADD)                               \
	DEFINE_FOLD(min_##name, type, acc_type, load, MIN)                               \
	DEFINE_FOLD(max_##name, type, acc_type, load, MAX)                               \
	DEFINE_SCALE(scale_##name, acc_type)                                             \
	DEFINE_COMBINE(name, type, acc_type, is_scaled)

/* Integers wrap around, as in torch: signed ones are added as unsigned. */
#define ADD8(a, b) ((int8_t)(uint8_t)((uint8_t)(a) + (uint8_t)(b)))
#define ADD16(a, b) ((int16_t)(uint16_t)((uint16_t)(a) + (uint16_t)(b)))
#define ADD32(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define ADD64(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))

DEFINE_DTYPE(float32, float, float, PLAIN, PLAIN, SUM, 1)
DEFINE_DTYPE(float64, double, double, PLAIN, PLAIN, SUM, 1)
DEFINE_DTYPE(float16, uint16_t, float, float16_to_float, float_to_float16, SUM, 1)
DEFINE_DTYPE(bfloat16, uint16_t, float, bfloat16_to_float, float_to_bfloat16, SUM, 1)
DEFINE_DTYPE(int8, int8_t, int8_t, PLAIN, PLAIN, ADD8, 0)
DEFINE_DTYPE(uint8, uint8_t, uint8_t, PLAIN, PLAIN, SUM, 0)
DEFINE_DTYPE(int16, int16_t, int16_t, PLAIN, PLAIN, ADD16, 0)
DEFINE_DTYPE(int32, int32_t, int32_t, PLAIN, PLAIN, ADD32, 0)
DEFINE_DTYPE(int64, int64_t, int64_t, PLAIN, PLAIN, ADD64, 0)
DEFINE_DTYPE(boolean, uint8_t, uint8_t, PLAIN, PLAIN, OR, 0)

/*
 * The frequent case, two ranks' gradients: one pass. @to is @a or @b, which the
 * compiler must be told to be harmless; both ranks add in the same order, which
 * decides whose NaN it is.
 */
CLONES static void average2(float *to, const float *a, const float *b, size_t n,
			    float factor)
{
#if defined(__clang__) && defined(__OPTIMIZE__) && !defined(ACCEL_SANITIZED)
#pragma clang loop vectorize(assume_safety)
#elif !defined(__clang__)
#pragma GCC ivdep
#endif
	for (size_t i = 0; i < n; i++)
		to[i] = (a[i] + b[i]) * factor;
}

/* The same in the arenas: one rank does it for both. */
CLONES static void average_both(float *restrict a, float *restrict b, size_t n,
				float factor)
{
	for (size_t i = 0; i < n; i++)
		a[i] = b[i] = (a[i] + b[i]) * factor;
}

typedef void combine_fn(int op, void *const *to, int n_to, const void *const *sources,
			int n, size_t count, double factor);

static combine_fn *const combiners[] = {
	[ACCEL_FLOAT32] = combine_float32, [ACCEL_FLOAT64] = combine_float64,
	[ACCEL_FLOAT16] = combine_float16, [ACCEL_BFLOAT16] = combine_bfloat16,
	[ACCEL_INT8] = combine_int8,       [ACCEL_UINT8] = combine_uint8,
	[ACCEL_INT16] = combine_int16,     [ACCEL_INT32] = combine_int32,
	[ACCEL_INT64] = combine_int64,     [ACCEL_BOOL] = combine_boolean,
};

void combine(int dtype, int op, void *const *to, int n_to, const void *const *sources,
	     int n, size_t count, double factor)
{
	bool is_pair = dtype == ACCEL_FLOAT32 && op <= ACCEL_MEAN && n == 2;

	if (is_pair && n_to == 2 && to[0] == sources[0] && to[1] == sources[1] &&
	    to[0] != to[1]) {
		average_both(to[0], to[1], count, (float)factor);
		return;
	}
	if (is_pair && n_to == 1 && (to[0] == sources[0] || to[0] == sources[1])) {
		average2(to[0], sources[0], sources[1], count, (float)factor);
		return;
	}
	combiners[dtype](op, to, n_to, sources, n, count, factor);
}

/* ---- the loss scale
 * ---------------------------------------------------------------------- */

/* x - x is NaN where x is infinite or NaN, else 0; sums of it vectorise. */
CLONES static float odd_sum32(float *x, size_t n, float factor)
{
	float sum = 0;

	for (size_t i = 0; i < n; i++) {
		x[i] *= factor;
		sum += x[i] - x[i];
	}
	return sum;
}

static double odd_sum64(double *x, size_t n, double factor)
{
	double sum = 0;

	for (size_t i = 0; i < n; i++) {
		x[i] *= factor;
		sum += x[i] - x[i];
	}
	return sum;
}

bool scale_and_check(int dtype, void *data, size_t count, double factor)
{
	_Alignas(CACHE_LINE) float acc[BLOCK];
	bool is_odd = false;

	if (dtype == ACCEL_FLOAT32)
		return isnan(odd_sum32(data, count, (float)factor));
	if (dtype == ACCEL_FLOAT64)
		return isnan(odd_sum64(data, count, factor));
	for (size_t at = 0; at < count; at += BLOCK) {
		size_t len = count - at < BLOCK ? count - at : BLOCK;
		uint16_t *x = (uint16_t *)data + at;

		if (dtype == ACCEL_FLOAT16)
			load_float16(acc, x, len);
		else
			load_bfloat16(acc, x, len);
		scale_float32(acc, len, (float)factor);
		/* What is too large for the type shows when it is stored. */
		if (dtype == ACCEL_FLOAT16) {
			store_float16(x, acc, len);
			load_float16(acc, x, len);
		} else {
			store_bfloat16(x, acc, len);
			load_bfloat16(acc, x, len);
		}
		is_odd |= isnan(odd_sum32(acc, len, 1));
	}
	return is_odd;
}
