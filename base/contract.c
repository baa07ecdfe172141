#include "base/contract.h"

#include <stddef.h>
#include <string.h>

static const char *const names[] = {
	"RANK",
	"WORLD_SIZE",
	"LOCAL_RANK",
	"LOCAL_WORLD_SIZE",
	"GROUP_RANK",
	"GROUP_WORLD_SIZE",
	"ROLE_RANK",
	"ROLE_WORLD_SIZE",
	"ROLE_NAME",
	"MASTER_ADDR",
	"MASTER_PORT",
	"TORCHELASTIC_RESTART_COUNT",
	"TORCHELASTIC_MAX_RESTARTS",
	"TORCHELASTIC_RUN_ID",
	"TORCHELASTIC_USE_AGENT_STORE",
	"TORCHELASTIC_ERROR_FILE",
	"ACCELERATE_MIXED_PRECISION",
	"ACCELERATE_USE_CPU",
	"ACCEL_JOB",
	"ACCEL_NODE",
	"ACCEL_ATTEMPT",
	"ACCEL_DEVICE",
	"ACCEL_MIXED_PRECISION",
	"ACCEL_CONTROL_FD",
	"ACCEL_CONTROL_INO",
	"ACCEL_SOCKET",
};

bool contract_has(const char *name)
{
	size_t len = strcspn(name, "=");

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (!strncmp(names[i], name, len) && !names[i][len])
			return true;
	return false;
}
