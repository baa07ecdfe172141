#pragma once

/*
 * What this machine has. Everything is read below @root ("" for the real
 * machine), so that tests bring their own /sys, /dev and /proc.
 */

#include <stddef.h>

#include "base/strv.h"

/* Accelerators of one kind that a program started here would see. */
struct devices {
	const char *kind; /* torch's name: "cuda", "xpu", "npu", ...; "cpu" when none */
	int count;        /* 0 for "cpu" */
	char from[160];   /* how it was found, for people */
};

/* The first kind of the device table that is present and not hidden by the
 * environment (CUDA_VISIBLE_DEVICES and its relatives). Never fails: a machine
 * that cannot be read has no accelerator. */
struct devices detect_devices(const char *root, char *const *env);

/* Cores' worth of time that the CPU quota of this process's cgroup (v1 or v2, the
 * tightest on the way up) allows, rounded up; 0 when there is no quota. */
int detect_quota(const char *root);

/* Processor cores this process may use at once: its affinity mask, lowered by
 * the cgroup's CPU quota (v1 and v2, rounded up). At least 1. */
int detect_cores(const char *root);
