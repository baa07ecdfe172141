#pragma once

/* The settings of a command, from all layers: options, ACCEL_* variables, the
 * configuration file, what the machine has, defaults. */

#include <stdbool.h>
#include <stddef.h>

#include "config/config.h"
#include "detect/detect.h"

struct err;
struct opt;

/* Ids of the options that are no settings; a command's own begin at the last. */
enum { OPT_CONFIG = N_SETTINGS, OPT_HELP, OPT_OF_COMMAND };

struct settings {
	struct config *config;
	const char *file;  /* --config, or NULL */
	bool help;         /* --help was given */
	bool show_devices; /* they are for people to see: look even if the count is known
			    */
	struct devices devices;
};

int settings_init(struct settings *s, struct err *err);
void settings_fini(struct settings *s);

/* The options of all settings, --config and --help. Returns how many. */
size_t settings_options(struct opt *out, size_t max);

/* For opt_parse(): an option with an id below OPT_OF_COMMAND. */
int settings_option(struct settings *s, const struct opt *o, const char *value,
		    struct err *err);

/* Load the other layers. Returns 0, or the exit code after telling the user. */
int settings_finish(struct settings *s);

/* The environment that workers start from: ours with the setting env over it. */
int settings_env(const struct settings *s, struct strv *out);

/* What workers on this machine call the store's address: "localhost" where the
 * hosts file has that name, so that nobody asks a name server. */
const char *settings_master_addr(void);
