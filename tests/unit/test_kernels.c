/*
 * The arithmetic of collectives, held against loops over one element at a time. The
 * conversions of 16-bit types are seen through combine(): one source times a factor.
 */

/* Before cmocka, whose fail() is a macro. */
#include "runtime/world.h"

#include "tests/unit/unit.h"

#include "tests/unit/dtypes.h"

enum { MAX_SOURCES = 5, MAX_COUNT = 4097, GUARD = 64 };

static const size_t counts[] = { 0, 1, 2, 1023, 1024, 1025, MAX_COUNT };
static const int ops[] = { ACCEL_SUM, ACCEL_MEAN, ACCEL_MIN, ACCEL_MAX };

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static uint64_t next_random(uint64_t *state)
{
	uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);

	x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
	return x ^ (x >> 31);
}

/* ---- buffers with guards ---------------------------------------------------------- */

/* As little aligned as a program's memory may be: one element off. */
struct buffer {
	uint8_t room[GUARD + MAX_COUNT * 8 + 8 + GUARD];
	uint8_t *data;
	size_t bytes;
};

static void buffer_init(struct buffer *b, int dtype, size_t count)
{
	size_t offset = dtype_size(dtype);

	memset(b->room, 0xa5, sizeof(b->room));
	b->data = b->room + (GUARD - (uintptr_t)b->room % GUARD) % GUARD + offset;
	b->bytes = count * dtype_size(dtype);
}

static void assert_guards(const struct buffer *b)
{
	for (const uint8_t *p = b->room; p < b->data; p++)
		assert_int_equal(*p, 0xa5);
	for (const uint8_t *p = b->data + b->bytes; p < b->room + sizeof(b->room); p++)
		assert_int_equal(*p, 0xa5);
}

static void fill_random(struct buffer *b, int dtype, uint64_t *random)
{
	static const double special[] = { 0,        -0.0,      1,     NAN,
					  INFINITY, -INFINITY, 1,     -1,
					  1e-320,   1e-44,     6e-8,  65504,
					  -65504,   3e38,      -3e38, 0.1 };
	size_t size = dtype_size(dtype);

	for (size_t i = 0; i < b->bytes / size; i++) {
		uint64_t x = next_random(random);

		if (dtype == ACCEL_BOOL)
			x &= 1;
		memcpy(b->data + i * size, &x, size);
		if (is_floating(dtype) && x >> 60 > 4)
			set_element(dtype, b->data, i, (double)(int8_t)(x >> 8) / 8);
		else if (is_floating(dtype) && x >> 60 > 2)
			set_element(dtype, b->data, i, special[x >> 40 & 15]);
	}
}

/* ---- the reference ---------------------------------------------------------------- */

static double fold_floats(int op, double a, double b, bool is_single)
{
	if (op == ACCEL_MIN || op == ACCEL_MAX) {
		if (isnan(a) || isnan(b))
			return (double)NAN;
		return op == ACCEL_MIN ? (b < a ? b : a) : (b > a ? b : a);
	}
	return is_single ? (double)((float)a + (float)b) : a + b;
}

static double reduce_floats(int dtype, int op, const void *const *sources, int n,
			    size_t i, double factor)
{
	bool is_single = dtype != ACCEL_FLOAT64;
	double acc = element(dtype, sources[0], i);

	for (int s = 1; s < n; s++)
		acc = fold_floats(op, acc, element(dtype, sources[s], i), is_single);
	if ((op == ACCEL_SUM || op == ACCEL_MEAN) && factor != 1)
		acc = is_single ? (double)((float)acc * (float)factor) : acc * factor;
	return acc;
}

/* In 64 bits; what is cut off afterwards is what wraps around. */
static uint64_t integer_at(int dtype, const void *data, size_t i)
{
	switch (dtype) {
	case ACCEL_INT8:
		return (uint64_t)((const int8_t *)data)[i];
	case ACCEL_INT16:
		return (uint64_t)((const int16_t *)data)[i];
	case ACCEL_INT32:
		return (uint64_t)((const int32_t *)data)[i];
	case ACCEL_INT64:
		return (uint64_t)((const int64_t *)data)[i];
	default:
		return ((const uint8_t *)data)[i];
	}
}

static uint64_t reduce_integers(int dtype, int op, const void *const *sources, int n,
				size_t i)
{
	uint64_t acc = integer_at(dtype, sources[0], i);

	for (int s = 1; s < n; s++) {
		uint64_t x = integer_at(dtype, sources[s], i);

		if (op == ACCEL_MIN)
			acc = (int64_t)x < (int64_t)acc ? x : acc;
		else if (op == ACCEL_MAX)
			acc = (int64_t)x > (int64_t)acc ? x : acc;
		else
			acc = dtype == ACCEL_BOOL ? acc | x : acc + x;
	}
	return acc;
}

static bool is_right(int dtype, int op, const void *const *sources, int n, size_t i,
		     double factor, const void *result)
{
	size_t size = dtype_size(dtype);

	if (is_floating(dtype)) {
		double got = element(dtype, result, i), want;
		uint64_t rounded = 0;

		want = reduce_floats(dtype, op, sources, n, i, factor);
		set_element(dtype, &rounded, 0, want);
		want = element(dtype, &rounded, 0);
		return isnan(want) ? isnan(got) : got == want;
	} else {
		uint64_t want = reduce_integers(dtype, op, sources, n, i);

		return memcmp((const uint8_t *)result + i * size, &want, size) == 0;
	}
}

/* ---- combine() -------------------------------------------------------------------- */

/* Which sources are written, one bit each, and how many places besides. */
struct layout {
	unsigned sources;
	int others;
};

static struct buffer inputs[MAX_SOURCES], before[MAX_SOURCES], outputs[MAX_SOURCES];

static void combine_as(int dtype, int op, int n, size_t count, double factor,
		       struct layout l, uint64_t *random)
{
	const void *sources[MAX_SOURCES], *old[MAX_SOURCES];
	void *to[2 * MAX_SOURCES];
	int n_to = 0;

	for (int s = 0; s < n; s++) {
		buffer_init(&inputs[s], dtype, count);
		buffer_init(&before[s], dtype, count);
		buffer_init(&outputs[s], dtype, count);
		fill_random(&inputs[s], dtype, random);
		memcpy(before[s].data, inputs[s].data, inputs[s].bytes);
		sources[s] = inputs[s].data;
		old[s] = before[s].data;
		if (l.sources >> s & 1)
			to[n_to++] = inputs[s].data;
	}
	for (int i = 0; i < l.others; i++)
		to[n_to++] = outputs[i].data;
	combine(dtype, op, to, n_to, sources, n, count, factor);
	for (int s = 0; s < n; s++) {
		assert_guards(&inputs[s]);
		assert_guards(&outputs[s]);
		if (!(l.sources >> s & 1))
			assert_memory_equal(inputs[s].data, old[s], inputs[s].bytes);
	}
	for (int t = 0; t < n_to; t++)
		for (size_t i = 0; i < count; i++)
			if (!is_right(dtype, op, old, n, i, factor, to[t]))
				fail_msg("%s, op %d, %d sources, element %zu of %zu, "
					 "destination %d of %d: %g",
					 dtype_name(dtype), op, n, i, count, t, n_to,
					 element(dtype, to[t], i));
}

static void combine_n(int dtype, int op, int n, size_t count, uint64_t *random)
{
	double factor = op == ACCEL_MEAN ? 1.0 / n : 1;

	combine_as(dtype, op, n, count, factor, (struct layout){ 0, 1 }, random);
	for (int s = 0; s < n; s++)
		combine_as(dtype, op, n, count, factor, (struct layout){ 1u << s, 0 },
			   random);
	/* As in the arenas: the result replaces all of them. */
	combine_as(dtype, op, n, count, factor, (struct layout){ (1u << n) - 1, 0 },
		   random);
	combine_as(dtype, op, n, count, factor, (struct layout){ 1, n }, random);
}

static void every_combination_is_that_of_single_elements(void **state)
{
	uint64_t random = 1;

	(void)state;
	for (int d = 0; d < N_ALL_DTYPES; d++)
		for (size_t o = 0; o < COUNT(ops); o++)
			for (int n = 1; n <= MAX_SOURCES; n++)
				for (size_t c = 0; c < COUNT(counts); c++)
					if (ops[o] != ACCEL_MEAN ||
					    is_floating(all_dtypes[d]))
						combine_n(all_dtypes[d], ops[o], n,
							  counts[c], &random);
}

static void a_factor_multiplies_sums_only(void **state)
{
	static const double factors[] = { 0.5, 1.0 / 3, 0, -2 };
	uint64_t random = 2;

	(void)state;
	for (int d = 0; d < N_ALL_DTYPES; d++)
		for (size_t o = 0; o < COUNT(ops); o++)
			for (size_t f = 0; f < COUNT(factors); f++)
				if (is_floating(all_dtypes[d]))
					combine_as(all_dtypes[d], ops[o], 2, 1025,
						   factors[f], (struct layout){ 1, 0 },
						   &random);
}

/* Two ranks reduce for themselves, each into its own place. */
static void the_bits_do_not_depend_on_the_place(int dtype, int op)
{
	static const uint64_t bits[][2] = {
		/* NaNs that differ in what they carry */
		[ACCEL_FLOAT32] = { 0x7fc00001, 0xffc00002 },
		[ACCEL_FLOAT64] = { 0x7ff8000000000001, 0xfff8000000000002 },
		[ACCEL_FLOAT16] = { 0x7e01, 0xfe02 },
		[ACCEL_BFLOAT16] = { 0x7fc1, 0xffc2 },
	};
	enum { N = 37 };
	uint8_t results[2][N * 8];
	size_t size = dtype_size(dtype);

	for (int place = 0; place < 2; place++) {
		uint8_t data[2][N * 8];
		const void *sources[2] = { data[0], data[1] };
		void *to = data[place];

		for (size_t i = 0; i < N; i++)
			for (int s = 0; s < 2; s++)
				memcpy(data[s] + i * size, &bits[dtype][s], size);
		combine(dtype, op, &to, 1, sources, 2, N, 0.5);
		memcpy(results[place], data[place], N * size);
	}
	assert_memory_equal(results[0], results[1], N * size);
}

static void all_ranks_compute_the_same_bits_even_of_two_nans(void **state)
{
	(void)state;
	for (int dtype = ACCEL_FLOAT32; dtype <= ACCEL_BFLOAT16; dtype++)
		for (size_t o = 0; o < COUNT(ops); o++)
			the_bits_do_not_depend_on_the_place(dtype, ops[o]);
}

static void nan_wins_wherever_it_is(void **state)
{
	(void)state;
	for (int dtype = ACCEL_FLOAT32; dtype <= ACCEL_BFLOAT16; dtype++)
		for (int op = ACCEL_MIN; op <= ACCEL_MAX; op++)
			for (int odd = 0; odd < 3; odd++) {
				uint64_t room[3][20];
				const void *sources[] = { room[0], room[1], room[2] };
				void *to = room[0];

				for (int s = 0; s < 3; s++)
					for (size_t i = 0; i < 20; i++)
						set_element(dtype, room[s], i,
							    s == odd ? (double)NAN : s);
				combine(dtype, op, &to, 1, sources, 3, 20, 1);
				for (size_t i = 0; i < 20; i++)
					assert_true(isnan(element(dtype, to, i)));
			}
}

static void integers_wrap_around(void **state)
{
	int8_t a8[] = { INT8_MAX, INT8_MIN }, b8[] = { 1, -1 };
	int16_t a16[] = { INT16_MAX, INT16_MIN }, b16[] = { 1, -1 };
	int32_t a32[] = { INT32_MAX, INT32_MIN }, b32[] = { 1, -1 };
	int64_t a64[] = { INT64_MAX, INT64_MIN }, b64[] = { 1, -1 };
	uint8_t au8[] = { 255, 128 }, bu8[] = { 1, 128 };

	(void)state;
	combine(ACCEL_INT8, ACCEL_SUM, (void *[]){ a8 }, 1, (const void *[]){ a8, b8 }, 2,
		2, 1);
	combine(ACCEL_INT16, ACCEL_SUM, (void *[]){ a16 }, 1,
		(const void *[]){ a16, b16 }, 2, 2, 1);
	combine(ACCEL_INT32, ACCEL_SUM, (void *[]){ a32 }, 1,
		(const void *[]){ a32, b32 }, 2, 2, 1);
	combine(ACCEL_INT64, ACCEL_SUM, (void *[]){ a64 }, 1,
		(const void *[]){ a64, b64 }, 2, 2, 1);
	combine(ACCEL_UINT8, ACCEL_SUM, (void *[]){ au8 }, 1,
		(const void *[]){ au8, bu8 }, 2, 2, 1);
	assert_true(a8[0] == INT8_MIN && a8[1] == INT8_MAX);
	assert_true(a16[0] == INT16_MIN && a16[1] == INT16_MAX);
	assert_true(a32[0] == INT32_MIN && a32[1] == INT32_MAX);
	assert_true(a64[0] == INT64_MIN && a64[1] == INT64_MAX);
	assert_true(au8[0] == 0 && au8[1] == 0);
}

static void sums_of_16_bits_do_not_overflow_on_their_way(void **state)
{
	uint16_t x[3];
	const void *sources[] = { &x[0], &x[1], &x[2] };
	void *to = &x[0];

	(void)state;
	for (int i = 0; i < 3; i++)
		set_element(ACCEL_FLOAT16, x, (size_t)i, 65504);
	combine(ACCEL_FLOAT16, ACCEL_MEAN, &to, 1, sources, 3, 1, 1.0 / 3);
	assert_true(element(ACCEL_FLOAT16, x, 0) == 65504);
	combine(ACCEL_FLOAT16, ACCEL_SUM, &to, 1, sources, 3, 1, 1);
	assert_true(isinf(element(ACCEL_FLOAT16, x, 0)));
	/* A small addend is not lost while the sum is still wide. */
	set_element(ACCEL_BFLOAT16, x, 0, 256);
	set_element(ACCEL_BFLOAT16, x, 1, 1);
	set_element(ACCEL_BFLOAT16, x, 2, 1);
	combine(ACCEL_BFLOAT16, ACCEL_SUM, &to, 1, sources, 3, 1, 1);
	assert_true(element(ACCEL_BFLOAT16, x, 0) == 258);
}

/* ---- conversions ------------------------------------------------------------------ */

static const struct {
	int dtype;
	const struct half_format *format;
	uint16_t one;
} halves[] = {
	{ ACCEL_FLOAT16, &float16_format, 0x3c00 },
	{ ACCEL_BFLOAT16, &bfloat16_format, 0x3f80 },
};

static void every_half_survives_a_round_trip(void **state)
{
	static uint16_t from[65536], to[65536];

	(void)state;
	for (size_t h = 0; h < COUNT(halves); h++) {
		const void *source = from;
		void *target = to;

		for (int i = 0; i < 65536; i++)
			from[i] = (uint16_t)i;
		combine(halves[h].dtype, ACCEL_SUM, &target, 1, &source, 1, 65536, 1);
		for (int i = 0; i < 65536; i++) {
			if (isnan(half_to_double(*halves[h].format, from[i])))
				assert_true(
					isnan(half_to_double(*halves[h].format, to[i])));
			else
				assert_int_equal(to[i], from[i]);
		}
	}
}

/* The value is seen once as the float that it is: through a comparison with itself in
 * wider precision, times something that keeps it exact. */
static void every_half_is_read_as_its_value(void **state)
{
	(void)state;
	for (size_t h = 0; h < COUNT(halves); h++)
		for (int i = 0; i < 65536; i++) {
			uint16_t bits = (uint16_t)i, result;
			double value = half_to_double(*halves[h].format, bits);
			const void *source = &bits;
			void *target = &result;

			combine(halves[h].dtype, ACCEL_SUM, &target, 1, &source, 1, 1,
				0.375);
			value = half_to_double(
				*halves[h].format,
				double_to_half(*halves[h].format,
					       (double)((float)value * 0.375f)));
			assert_true(isnan(value) ? isnan(half_to_double(*halves[h].format,
									result))
						 : half_to_double(*halves[h].format,
								  result) == value);
		}
}

static void assert_rounded(size_t h, float value)
{
	uint16_t bits = halves[h].one, result;
	const void *source = &bits;
	void *target = &result;
	uint16_t want = double_to_half(*halves[h].format, (double)value);

	combine(halves[h].dtype, ACCEL_SUM, &target, 1, &source, 1, 1, (double)value);
	if (isnan(value) ? !isnan(half_to_double(*halves[h].format, result))
			 : result != want)
		fail_msg("%a becomes %04x as %s, not %04x", (double)value, result,
			 dtype_name(halves[h].dtype), want);
}

/* Between each two neighbours: the middle, and what lies just beside it. */
static void floats_are_rounded_to_the_nearest_half_and_ties_to_even(void **state)
{
	(void)state;
	for (size_t h = 0; h < COUNT(halves); h++)
		for (uint16_t i = 0; !isinf(half_to_double(*halves[h].format, i)); i++) {
			double low = half_to_double(*halves[h].format, i);
			double high =
				half_to_double(*halves[h].format, (uint16_t)(i + 1));
			float middle = (float)(low + (high - low) / 2);

			if (isinf(high)) /* where the next one would be */
				middle = (float)(low +
						 ldexp(low,
						       -1 - halves[h].format->mantissa));
			for (int sign = -1; sign <= 1; sign += 2) {
				float s = (float)sign;

				assert_rounded(h, s * middle);
				assert_rounded(h, s * nextafterf(middle, 0));
				assert_rounded(h, s * nextafterf(middle, INFINITY));
				assert_rounded(h, s * (float)low);
				assert_rounded(h, s * nextafterf((float)low, INFINITY));
			}
		}
}

static void any_float_becomes_the_nearest_half(void **state)
{
	uint64_t random = 3;

	(void)state;
	for (size_t h = 0; h < COUNT(halves); h++) {
		for (int i = 0; i < 300000; i++) {
			uint32_t bits = (uint32_t)next_random(&random);
			float value;

			memcpy(&value, &bits, sizeof(value));
			assert_rounded(h, value);
		}
		assert_rounded(h, INFINITY);
		assert_rounded(h, -INFINITY);
		assert_rounded(h, NAN);
		assert_rounded(h, 65519.996f);
		assert_rounded(h, 65520);
		assert_rounded(h, 3.4028235e38f);
		assert_rounded(h, 0x1p-25f);
		assert_rounded(h, -0x1p-149f);
	}
}

/* ---- scale_and_check() ------------------------------------------------------------ */

static void scaling_multiplies_every_element(void **state)
{
	static struct buffer b, old;
	uint64_t random = 4;

	(void)state;
	for (int dtype = ACCEL_FLOAT32; dtype <= ACCEL_BFLOAT16; dtype++)
		for (size_t c = 0; c < COUNT(counts); c++) {
			buffer_init(&b, dtype, counts[c]);
			buffer_init(&old, dtype, counts[c]);
			for (size_t i = 0; i < counts[c]; i++)
				set_element(dtype, b.data, i,
					    (double)(int16_t)next_random(&random) / 256);
			memcpy(old.data, b.data, b.bytes);
			assert_false(scale_and_check(dtype, b.data, counts[c], 0.25));
			assert_guards(&b);
			for (size_t i = 0; i < counts[c]; i++)
				assert_true(element(dtype, b.data, i) ==
					    element(dtype, old.data, i) * 0.25);
		}
}

static void one_odd_element_is_found_wherever_it_is(void **state)
{
	static const double odd[] = { (double)NAN, (double)INFINITY, -(double)INFINITY };
	static struct buffer b;

	(void)state;
	for (int dtype = ACCEL_FLOAT32; dtype <= ACCEL_BFLOAT16; dtype++)
		for (size_t c = 1; c < COUNT(counts); c++)
			for (size_t o = 0; o < COUNT(odd); o++)
				for (size_t at = 0; at<counts[c]; at += counts[c]> 40
							    ? counts[c] / 40
							    : 1) {
					buffer_init(&b, dtype, counts[c]);
					for (size_t i = 0; i < counts[c]; i++)
						set_element(dtype, b.data, i, -1);
					set_element(dtype, b.data, at, odd[o]);
					assert_true(scale_and_check(dtype, b.data,
								    counts[c], 0.5));
					assert_guards(&b);
				}
}

static void opposite_infinities_do_not_cancel_each_other(void **state)
{
	(void)state;
	for (int dtype = ACCEL_FLOAT32; dtype <= ACCEL_BFLOAT16; dtype++) {
		uint64_t room[2];

		set_element(dtype, room, 0, (double)INFINITY);
		set_element(dtype, room, 1, -(double)INFINITY);
		assert_true(scale_and_check(dtype, room, 2, 0.5));
	}
}

static void large_elements_are_not_taken_for_infinite_ones(void **state)
{
	enum { N = 3000 };
	static float singles[N];
	static double doubles[N];

	(void)state;
	for (int i = 0; i < N; i++) {
		singles[i] = i & 1 ? 3e38f : -3e38f;
		doubles[i] = 1e308;
	}
	assert_false(scale_and_check(ACCEL_FLOAT32, singles, N, 1));
	assert_false(scale_and_check(ACCEL_FLOAT64, doubles, N, 1));
}

static void an_overflow_of_the_product_is_found(void **state)
{
	enum { N = 100 };

	(void)state;
	for (int dtype = ACCEL_FLOAT32; dtype <= ACCEL_BFLOAT16; dtype++) {
		static const double large[] = { [ACCEL_FLOAT32] = 3e38,
						[ACCEL_FLOAT64] = 1e308,
						[ACCEL_FLOAT16] = 60000,
						[ACCEL_BFLOAT16] = 3e38 };
		uint64_t room[N];

		for (size_t i = 0; i < N; i++)
			set_element(dtype, room, i, i == 70 ? large[dtype] : 1);
		assert_true(scale_and_check(dtype, room, N, 4));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_combination_is_that_of_single_elements),
		cmocka_unit_test(a_factor_multiplies_sums_only),
		cmocka_unit_test(all_ranks_compute_the_same_bits_even_of_two_nans),
		cmocka_unit_test(nan_wins_wherever_it_is),
		cmocka_unit_test(integers_wrap_around),
		cmocka_unit_test(sums_of_16_bits_do_not_overflow_on_their_way),
		cmocka_unit_test(every_half_survives_a_round_trip),
		cmocka_unit_test(every_half_is_read_as_its_value),
		cmocka_unit_test(floats_are_rounded_to_the_nearest_half_and_ties_to_even),
		cmocka_unit_test(any_float_becomes_the_nearest_half),
		cmocka_unit_test(scaling_multiplies_every_element),
		cmocka_unit_test(one_odd_element_is_found_wherever_it_is),
		cmocka_unit_test(opposite_infinities_do_not_cancel_each_other),
		cmocka_unit_test(large_elements_are_not_taken_for_infinite_ones),
		cmocka_unit_test(an_overflow_of_the_product_is_found),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
