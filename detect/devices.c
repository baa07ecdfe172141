/*
 * Which accelerators a program started here would see: one row for each kind,
 * how to count it without its vendor's library, and the variables that hide
 * devices of it. A count, not a health check: nothing is opened or asked.
 */

#include "detect/detect.h"

#include <dirent.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/own.h"
#include "base/path.h"
#include "base/strv.h"

enum {
	FILE_MAX = 64 * 1024,
	LISTED_MAX = 1024,   /* entries of a visibility variable */
	MAX_LISTINGS = 64,   /* folders looked into */
	CORES_OF_NEURON = 2, /* where its driver does not say */
};

/* Vendors, as PCI numbers them. */
enum {
	VENDOR_GOOGLE = 0x1ae0,
	VENDOR_HABANA = 0x1da3,
	VENDOR_INTEL = 0x8086,
};

/* Chips of Google that are TPUs (it makes network cards too), and how many
 * devices the framework makes of one. */
static const struct {
	unsigned id;
	int devices;
} tpu_chips[] = {
	{ 0x0027, 1 }, /* v2, v3 */
	{ 0x005e, 1 }, /* v4 */
	{ 0x0062, 1 }, /* v5p */
	{ 0x0063, 1 }, /* v5e */
	{ 0x006f, 1 }, /* v6e */
	{ 0x0076, 2 }, /* v7x */
};

/* An integrated Intel GPU is always here; a card never is, but for virtual
 * machines, where only its class tells it. */
static const char integrated_gpu[] = "0000:00:02.0";
static const unsigned class_display = 0x0380;

struct device_row;

/* What has been read of the machine in one look at it. */
struct listing {
	char folder[NAME_MAX + 64];
	struct strv names;
};

struct machine {
	const char *root;
	struct listing listings[MAX_LISTINGS];
	int n_listings;
};

/* One variable that hides devices, or two spellings of it: the first that is set
 * counts. apply() returns how many of @n devices are left. */
struct visibility {
	const char *name, *other;
	int (*apply)(const char *value, int n);
};

struct device_row {
	const char *kind;  /* torch's name */
	const char *where; /* for people */
	int (*count)(struct machine *m, const struct device_row *row);
	const char *folder, *prefix; /* of device nodes, followed by a number */
	unsigned vendor;             /* where others have nodes of that name */
	struct visibility layers[2]; /* each within what the one before left */
};

/* --- reading --- */

__attribute__((format(printf, 2, 3))) static char *read_text(const char *root,
							     const char *fmt, ...)
{
	char path[PATH_MAX];
	struct buf text = { 0 };
	int at = snprintf(path, sizeof(path), "%s", root);
	va_list ap;

	if (at < 0 || at >= PATH_MAX)
		return NULL;
	va_start(ap, fmt);
	(void)vsnprintf(path + at, sizeof(path) - (size_t)at, fmt, ap);
	va_end(ap);
	if (path_read_file(&text, path, FILE_MAX, NULL) < 0 ||
	    buf_add(&text, "", 1) < 0) {
		buf_fini(&text);
		return NULL;
	}
	return (char *)text.mem;
}

__attribute__((format(printf, 2, 3))) static bool exists(const char *root,
							 const char *fmt, ...)
{
	char path[PATH_MAX];
	int at = snprintf(path, sizeof(path), "%s", root);
	va_list ap;

	if (at < 0 || at >= PATH_MAX)
		return false;
	va_start(ap, fmt);
	(void)vsnprintf(path + at, sizeof(path) - (size_t)at, fmt, ap);
	va_end(ap);
	return access(path, F_OK) == 0;
}

/* The last part of what the link root/folder/name points to, or "". */
static const char *link_end(char *target, size_t size, const char *root,
			    const char *folder, const char *name)
{
	char path[PATH_MAX];
	const char *slash;
	ssize_t len;

	(void)snprintf(path, sizeof(path), "%s%s/%s", root, folder, name);
	len = readlink(path, target, size - 1);
	target[len > 0 ? len : 0] = 0;
	slash = strrchr(target, '/');
	return slash ? slash + 1 : target;
}

/* "0x8086\n" of a PCI device, or 0. */
static unsigned read_hex(const char *root, const char *folder, const char *name,
			 const char *file)
{
	OWN_MEM char *text = read_text(root, "%s/%s/%s", folder, name, file);

	return text ? (unsigned)strtoul(text, NULL, 16) : 0;
}

/* Does @name consist of @prefix and a number? */
static bool is_numbered(const char *name, const char *prefix)
{
	size_t len = strlen(prefix), digits;

	if (strncmp(name, prefix, len))
		return false;
	digits = strspn(name + len, "0123456789");
	return digits && !name[len + digits];
}

typedef int count_one_fn(struct machine *m, const struct device_row *row,
			 const char *name);

/*
 * Each folder is listed once in a look at the machine, though several rows ask:
 * /dev has hundreds of entries.
 */
static const struct strv *list_folder(struct machine *m, const char *folder)
{
	struct listing *l = m->listings;
	char path[PATH_MAX];
	struct dirent *e;
	DIR *dir;

	for (; l < m->listings + m->n_listings; l++)
		if (!strcmp(l->folder, folder))
			return &l->names;
	if (m->n_listings == MAX_LISTINGS)
		return NULL;
	m->n_listings++;
	(void)snprintf(l->folder, sizeof(l->folder), "%s", folder);
	(void)snprintf(path, sizeof(path), "%s%s", m->root, folder);
	dir = opendir(path);
	while (dir && (e = readdir(dir)))
		if (e->d_name[0] != '.')
			(void)strv_add(&l->names, e->d_name);
	if (dir)
		(void)closedir(dir);
	return &l->names;
}

static void machine_fini(struct machine *m)
{
	for (int i = 0; i < m->n_listings; i++)
		strv_fini(&m->listings[i].names);
}

/* The sum of @fn over the entries of root/folder. */
static int sum_folder(struct machine *m, const char *folder, count_one_fn *fn,
		      const struct device_row *row)
{
	const struct strv *names = list_folder(m, folder);
	int sum = 0;

	for (size_t i = 0; names && i < names->n; i++)
		sum += fn(m, row, names->v[i]);
	return sum;
}

/* --- counting --- */

static int node(struct machine *m, const struct device_row *row, const char *name)
{
	if (!is_numbered(name, row->prefix))
		return 0;
	return !row->vendor || read_hex(m->root, "/sys/class/accel", name,
					"device/vendor") == row->vendor;
}

static int count_nodes(struct machine *m, const struct device_row *row)
{
	return sum_folder(m, row->folder, node, row);
}

/* A GPU of the kernel's topology counts when its render node is here too, since
 * a container sees all of the first and its own of the second. */
static int kfd_node(struct machine *m, const struct device_row *row, const char *name)
{
	OWN_MEM char *text = read_text(m->root, "%s/%s/properties",
				       "/sys/class/kfd/kfd/topology/nodes", name);
	const char *simds = text ? strstr(text, "simd_count ") : NULL;
	const char *render = text ? strstr(text, "drm_render_minor ") : NULL;
	long minor;

	(void)row;
	if (!simds || strtol(simds + strlen("simd_count "), NULL, 10) <= 0)
		return 0;
	minor = render ? strtol(render + strlen("drm_render_minor "), NULL, 10) : 0;
	return minor <= 0 || exists(m->root, "/dev/dri/renderD%ld", minor);
}

static int count_kfd(struct machine *m, const struct device_row *row)
{
	if (!exists(m->root, "/dev/kfd"))
		return 0;
	return sum_folder(m, "/sys/class/kfd/kfd/topology/nodes", kfd_node, row);
}

/* Cards only: the GPU inside an Intel processor is no accelerator, and taking it
 * for one would make its machine's jobs expect a device. */
static int render_node(struct machine *m, const struct device_row *row, const char *name)
{
	char folder[NAME_MAX + 64], target[PATH_MAX];

	(void)snprintf(folder, sizeof(folder), "/sys/class/drm/%s", name);
	if (!is_numbered(name, row->prefix) ||
	    read_hex(m->root, folder, "device", "vendor") != row->vendor)
		return 0;
	return read_hex(m->root, folder, "device", "class") >> 8 == class_display ||
	       strcmp(link_end(target, sizeof(target), m->root, folder, "device"),
		      integrated_gpu);
}

static int count_render(struct machine *m, const struct device_row *row)
{
	return sum_folder(m, row->folder, render_node, row);
}

static int neuron_core(struct machine *m, const struct device_row *row, const char *name)
{
	(void)m;
	(void)row;
	return is_numbered(name, "neuron_core");
}

/* The unit of a process is a core, of which a device has several. */
static int neuron_device(struct machine *m, const struct device_row *row,
			 const char *name)
{
	char folder[NAME_MAX + 64];
	int cores;

	if (!is_numbered(name, row->prefix))
		return 0;
	(void)snprintf(folder, sizeof(folder), "/sys/class/neuron_device/%s", name);
	cores = sum_folder(m, folder, neuron_core, row);
	return cores ? cores : CORES_OF_NEURON;
}

static int count_neuron(struct machine *m, const struct device_row *row)
{
	return sum_folder(m, row->folder, neuron_device, row);
}

static int tpu_chip(struct machine *m, const struct device_row *row, const char *name)
{
	static const char folder[] = "/sys/bus/pci/devices";
	unsigned id;

	if (read_hex(m->root, folder, name, "vendor") != row->vendor)
		return 0;
	id = read_hex(m->root, folder, name, "device");
	for (size_t i = 0; i < sizeof(tpu_chips) / sizeof(tpu_chips[0]); i++)
		if (tpu_chips[i].id == id)
			return tpu_chips[i].devices;
	return 0;
}

/* A chip is usable through the node of its IOMMU group. */
static int tpu_group(struct machine *m, const struct device_row *row, const char *name)
{
	char folder[NAME_MAX + 64], target[PATH_MAX];
	const char *group;
	int devices = tpu_chip(m, row, name);

	if (!devices)
		return 0;
	(void)snprintf(folder, sizeof(folder), "/sys/bus/pci/devices/%s", name);
	group = link_end(target, sizeof(target), m->root, folder, "iommu_group");
	return *group && exists(m->root, "/dev/vfio/%s", group) ? devices : 0;
}

static int tpu_node(struct machine *m, const struct device_row *row, const char *name)
{
	(void)m;
	return is_numbered(name, row->prefix);
}

/* Newer chips are given out by VFIO, older ones have nodes of their own. */
static int count_tpu(struct machine *m, const struct device_row *row)
{
	static const char folder[] = "/sys/bus/pci/devices";
	int devices;

	/* Without a node of either kind there is nothing to use, and hundreds of PCI
	 * devices need not be asked. */
	if (!exists(m->root, "/dev/vfio") && !sum_folder(m, row->folder, tpu_node, row))
		return 0;
	devices = sum_folder(m, folder, tpu_group, row);
	if (devices || !sum_folder(m, folder, tpu_chip, row))
		return devices;
	return sum_folder(m, row->folder, tpu_node, row);
}

/* --- visibility --- */

/* The number an entry begins with, or -1: "1", " 1", "1gpu". */
static long entry_number(const char *entry)
{
	char *end;
	long n;

	entry += strspn(entry, " \t");
	n = strtol(entry, &end, 10);
	return end == entry || n > INT_MAX ? -1 : n;
}

/* UUIDs cannot be looked up here: those that look right are taken for right. */
static int visible_uuids(char *list, const char *prefix, int n)
{
	char *seen[LISTED_MAX], *save = NULL;
	int count = 0;

	for (char *e = strtok_r(list, ",", &save); e; e = strtok_r(NULL, ",", &save)) {
		if (strncmp(e, prefix, strlen(prefix)) || count == LISTED_MAX)
			break;
		for (int i = 0; i < count; i++)
			if (!strcmp(seen[i], e))
				return 0;
		seen[count++] = e;
	}
	return count < n ? count : n;
}

/* CUDA's rule, which torch and others follow: an entry that names no device
 * hides itself and all after it, and one that is there twice hides everything. */
static int visible_strict(const char *value, int n)
{
	OWN_MEM char *list = strdup(value);
	bool seen[LISTED_MAX] = { false };
	int count = 0;

	if (!list || !n)
		return n;
	if (!strncmp(list, "MIG-", 4))
		return 1; /* a process uses one such part, whatever it sees */
	if (!strncmp(list, "GPU-", 4))
		return visible_uuids(list, "GPU-", n);
	for (char *e = list, *next; e; e = next) {
		long i;

		next = strchr(e, ',');
		if (next)
			*next++ = 0;
		i = entry_number(e);
		if (i < 0 || i >= n || i >= LISTED_MAX)
			break;
		if (seen[i])
			return 0;
		seen[i] = true;
		count++;
	}
	return count;
}

/* Numbers, ranges "0-3" and tiles "0.1"; "all"; what names no device is passed
 * over, and what is there twice counts once. */
static int visible_lenient(const char *value, int n)
{
	bool seen[LISTED_MAX] = { false };
	int count = 0;

	if (!strcmp(value, "all"))
		return n;
	for (const char *e = value, *comma; e; e = comma ? comma + 1 : NULL) {
		long first, last;
		const char *dash;

		comma = strchr(e, ',');
		first = last = entry_number(e);
		dash = e + strcspn(e, "-,");
		if (first >= 0 && *dash == '-')
			last = entry_number(dash + 1);
		for (long i = first; i >= 0 && i <= last && i < n && i < LISTED_MAX;
		     i++) {
			count += !seen[i];
			seen[i] = true;
		}
	}
	return count;
}

/* "How many", not "which". */
static int visible_number(const char *value, int n)
{
	long most = entry_number(value);

	return most < 0 || most > n ? n : (int)most;
}

/* --- the table --- */

#define NODES(dir, name) .count = count_nodes, .folder = (dir), .prefix = (name)

/* In the order in which a machine that has several is understood. */
static const struct device_row rows[] = {
	{ "cuda", "/dev", NODES("/dev", "nvidia"),
	  .layers = { { "CUDA_VISIBLE_DEVICES", NULL, visible_strict } } },
	{ "cuda", "the AMD driver's topology", count_kfd,
	  .layers = { { "ROCR_VISIBLE_DEVICES", NULL, visible_strict },
		      { "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES",
			visible_strict } } },
	{ "xpu",
	  "/dev/dri",
	  count_render,
	  "/dev/dri",
	  "renderD",
	  VENDOR_INTEL,
	  { { "ZE_AFFINITY_MASK", NULL, visible_lenient } } },
	{ "hpu", "/dev/accel", NODES("/dev/accel", "accel"), .vendor = VENDOR_HABANA,
	  .layers = { { "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES",
			visible_lenient } } },
	{ "hpu", "/dev", NODES("/dev", "hl"),
	  .layers = { { "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES",
			visible_lenient } } },
	{ "npu", "/dev", NODES("/dev", "davinci"),
	  .layers = { { "ASCEND_RT_VISIBLE_DEVICES", NULL, visible_strict } } },
	{ "neuron",
	  "/dev",
	  count_neuron,
	  "/dev",
	  "neuron",
	  0,
	  { { "NEURON_RT_VISIBLE_CORES", NULL, visible_lenient },
	    { "NEURON_RT_NUM_CORES", NULL, visible_number } } },
	{ "tpu",
	  "the PCI bus",
	  count_tpu,
	  "/dev",
	  "accel",
	  VENDOR_GOOGLE,
	  { { "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", visible_lenient } } },
	{ "mlu", "/dev", NODES("/dev", "cambricon_dev"),
	  .layers = { { "MLU_VISIBLE_DEVICES", NULL, visible_strict } } },
	{ "musa", "/dev", NODES("/dev", "mtgpu."),
	  .layers = { { "MUSA_VISIBLE_DEVICES", NULL, visible_strict } } },
	{ "musa", "/dev", NODES("/dev", "mtgpu"),
	  .layers = { { "MUSA_VISIBLE_DEVICES", NULL, visible_strict } } },
};

/* How many of @n are left, with *@ret_by the variable that took some away. */
static int apply_layers(const struct device_row *row, int n, char *const *env,
			const char **ret_by)
{
	for (size_t i = 0; i < sizeof(row->layers) / sizeof(row->layers[0]); i++) {
		const struct visibility *v = &row->layers[i];
		const char *name = v->name, *value = env_get(env, name);
		int left;

		if (!value)
			value = env_get(env, name = v->other);
		if (!value)
			continue;
		left = v->apply(value, n);
		if (left < n)
			*ret_by = name;
		n = left;
	}
	return n;
}

static struct devices look(struct machine *m, char *const *env)
{
	struct devices d = { .kind = "cpu", .from = "no accelerator" };

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		const struct device_row *row = &rows[i];
		const char *by = NULL;
		int all = row->count(m, row), n = apply_layers(row, all, env, &by);

		if (!n && all) {
			(void)snprintf(d.from, sizeof(d.from),
				       "%s hides all %d %s device%s", by, all, row->kind,
				       all == 1 ? "" : "s");
			continue;
		}
		if (!n)
			continue;
		d.kind = row->kind;
		d.count = n;
		if (by)
			(void)snprintf(d.from, sizeof(d.from),
				       "%d of %d %s device%s in %s, by %s", n, all,
				       d.kind, all == 1 ? "" : "s", row->where, by);
		else
			(void)snprintf(d.from, sizeof(d.from), "%d %s device%s in %s", n,
				       d.kind, n == 1 ? "" : "s", row->where);
		return d;
	}
	return d;
}

struct devices detect_devices(const char *root, char *const *env)
{
	struct machine m = { .root = root };
	struct devices d = look(&m, env);

	machine_fini(&m);
	return d;
}
