#pragma once

/*
 * The contract with a worker: the names of the variables that accel sets for
 * each, whatever the launching environment held. They describe one job, so they
 * never pass from outside, and nobody but accel may set them. The rest of
 * ACCEL_* are settings.
 */

#include <stdbool.h>

/* @name ends at '=' or its end. */
bool contract_has(const char *name);
