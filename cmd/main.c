/* accel: picks the subcommand. */

#include <stdio.h>
#include <string.h>

#include "base/near.h"
#include "base/path.h"
#include "cmd/cmd.h"

static const struct command {
	const char *name, *help;
	int (*run)(int argc, char **argv);
} commands[] = {
	{ "launch", "Run a program in several processes", cmd_launch },
	{ "status", "List your running jobs", cmd_status },
	{ "config", "Show the settings and where they come from", cmd_config },
};
enum { N_COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void print_help(void)
{
	puts("usage: accel COMMAND [options]\n"
	     "\n"
	     "Run an ordinary training program in several processes, and look after\n"
	     "them. The usual start:\n"
	     "\n"
	     "  accel launch -n 2 train.py --lr 3e-4\n"
	     "\n"
	     "Commands:");
	for (int i = 0; i < N_COMMANDS; i++)
		printf("  %-10s %s\n", commands[i].name, commands[i].help);
	puts("\n"
	     "accel COMMAND --help tells more. accel --version prints the version.");
}

static int unknown(const char *word)
{
	const char *names[N_COMMANDS], *near;
	char text[256], hint[256];

	for (int i = 0; i < N_COMMANDS; i++)
		names[i] = commands[i].name;
	near = near_match(word, names, N_COMMANDS);
	(void)snprintf(text, sizeof(text), "%s: there is no such command", word);
	if (near)
		(void)snprintf(hint, sizeof(hint), "Did you mean: accel %s", near);
	else
		(void)snprintf(hint, sizeof(hint), "accel --help lists the commands.");
	say_error(text, hint);
	return EXIT_USAGE;
}

int main(int argc, char **argv)
{
	const char *word = argc > 1 ? argv[1] : "--help";
	char *help[] = { argv[0], argc > 2 ? argv[2] : NULL, (char *)"--help", NULL };

	fd_open_standard();
	if (!strcmp(word, "--version")) {
		puts("accel " ACCEL_VERSION);
		return 0;
	}
	if (!strcmp(word, "--help") || !strcmp(word, "-h") ||
	    (!strcmp(word, "help") && argc == 2)) {
		print_help();
		return argc > 1 ? 0 : EXIT_USAGE;
	}
	if (!strcmp(word, "help")) {
		argc = 3;
		argv = help;
		word = help[1];
	}
	for (int i = 0; i < N_COMMANDS; i++)
		if (!strcmp(word, commands[i].name))
			return commands[i].run(argc - 1, argv + 1);
	return unknown(word);
}
