#pragma once

/*
 * Elements of any dtype as double, and back: slow and obvious, to compare the
 * library's arithmetic with. Integers of 64 bits are exact up to 2^53.
 */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "runtime/accel.h"

static const int all_dtypes[] = { ACCEL_FLOAT32,  ACCEL_FLOAT64, ACCEL_FLOAT16,
				  ACCEL_BFLOAT16, ACCEL_INT8,    ACCEL_UINT8,
				  ACCEL_INT16,    ACCEL_INT32,   ACCEL_INT64,
				  ACCEL_BOOL };

enum { N_ALL_DTYPES = sizeof(all_dtypes) / sizeof(all_dtypes[0]) };

/* A 16-bit type: sign, exponent, mantissa. */
struct half_format {
	int mantissa, bias;
};

static const struct half_format float16_format = { 10, 15 };
static const struct half_format bfloat16_format = { 7, 127 };

static inline double half_to_double(struct half_format f, uint16_t bits)
{
	int exponent_max = (1 << (15 - f.mantissa)) - 1;
	int exponent = bits >> f.mantissa & exponent_max;
	int mantissa = bits & ((1 << f.mantissa) - 1);
	double sign = bits & 0x8000 ? -1 : 1;

	if (exponent == exponent_max)
		return mantissa ? (double)NAN : sign * (double)INFINITY;
	if (!exponent)
		return sign * ldexp(mantissa, 1 - f.bias - f.mantissa);
	return sign * ldexp(mantissa + (1 << f.mantissa), exponent - f.bias - f.mantissa);
}

/* To nearest, ties to even. Every NaN becomes the same one. */
static inline uint16_t double_to_half(struct half_format f, double value)
{
	uint16_t sign = signbit(value) ? 0x8000 : 0;
	uint16_t infinite = (uint16_t)(0x7fff >> f.mantissa << f.mantissa);
	int exponent, last;
	double steps;

	if (isnan(value))
		return (uint16_t)(infinite | 1 << (f.mantissa - 1));
	if (isinf(value) || !value)
		return (uint16_t)(sign | (value ? infinite : 0));
	(void)frexp(value, &exponent);
	/* The weight of the last bit, which subnormals have in common. */
	last = exponent - 1 - f.mantissa;
	if (last < 1 - f.bias - f.mantissa)
		last = 1 - f.bias - f.mantissa;
	steps = nearbyint(ldexp(fabs(value), -last));
	/* A carry out of the mantissa adds one to the exponent, as it should. */
	steps += ldexp(last - (1 - f.bias - f.mantissa), f.mantissa);
	return (uint16_t)(sign | (steps < infinite ? (uint16_t)steps : infinite));
}

static inline double element(int dtype, const void *data, size_t i)
{
	switch (dtype) {
	case ACCEL_FLOAT32:
		return (double)((const float *)data)[i];
	case ACCEL_FLOAT64:
		return ((const double *)data)[i];
	case ACCEL_FLOAT16:
		return half_to_double(float16_format, ((const uint16_t *)data)[i]);
	case ACCEL_BFLOAT16:
		return half_to_double(bfloat16_format, ((const uint16_t *)data)[i]);
	case ACCEL_INT8:
		return ((const int8_t *)data)[i];
	case ACCEL_INT16:
		return ((const int16_t *)data)[i];
	case ACCEL_INT32:
		return ((const int32_t *)data)[i];
	case ACCEL_INT64:
		return (double)((const int64_t *)data)[i];
	default:
		return ((const uint8_t *)data)[i];
	}
}

static inline void set_element(int dtype, void *data, size_t i, double value)
{
	switch (dtype) {
	case ACCEL_FLOAT32:
		((float *)data)[i] = (float)value;
		break;
	case ACCEL_FLOAT64:
		((double *)data)[i] = value;
		break;
	case ACCEL_FLOAT16:
		((uint16_t *)data)[i] = double_to_half(float16_format, value);
		break;
	case ACCEL_BFLOAT16:
		((uint16_t *)data)[i] = double_to_half(bfloat16_format, value);
		break;
	case ACCEL_INT8:
		((int8_t *)data)[i] = (int8_t)value;
		break;
	case ACCEL_INT16:
		((int16_t *)data)[i] = (int16_t)value;
		break;
	case ACCEL_INT32:
		((int32_t *)data)[i] = (int32_t)value;
		break;
	case ACCEL_INT64:
		((int64_t *)data)[i] = (int64_t)value;
		break;
	default:
		((uint8_t *)data)[i] = (uint8_t)value;
		break;
	}
}
