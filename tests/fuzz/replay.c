/*
 * Stands in for libFuzzer: runs the target over every file of the folders
 * given, so that what a fuzzer once found stays found.
 */

#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
	static uint8_t data[1 << 20];
	FILE *f = fopen(path, "rb");
	size_t len;

	if (!f)
		return -errno;
	len = fread(data, 1, sizeof(data), f);
	(void)fclose(f);
	/* An exact copy, so that a sanitizer sees one byte too far. */
	uint8_t *exact = malloc(len ? len : 1);

	if (!exact)
		return -ENOMEM;
	memcpy(exact, data, len);
	(void)LLVMFuzzerTestOneInput(exact, len);
	free(exact);
	return 0;
}

int main(int argc, char **argv)
{
	int n = 0;

	for (int i = 1; i < argc; i++) {
		DIR *dir = opendir(argv[i]);
		struct dirent *e;

		if (!dir) {
			fprintf(stderr, "%s: %s\n", argv[i], strerror(errno));
			return 1;
		}
		while ((e = readdir(dir))) {
			char path[4096];

			if (e->d_name[0] == '.')
				continue;
			snprintf(path, sizeof(path), "%s/%s", argv[i], e->d_name);
			if (replay_file(path) < 0)
				return 1;
			n++;
		}
		closedir(dir);
	}
	printf("%d inputs replayed\n", n);
	return n ? 0 : 1;
}
