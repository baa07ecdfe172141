/* What a machine has, on machines made of files. */

#include "tests/unit/unit.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/own.h"
#include "base/path.h"
#include "detect/detect.h"

static char root[64];

static int make_root(void **state)
{
	(void)state;
	(void)strcpy(root, "/tmp/test_detect.XXXXXX");
	return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
	char command[128];

	(void)state;
	(void)snprintf(command, sizeof(command), "rm -rf '%s'", root);
	return system(command);
}

static void path_of(char *out, const char *path)
{
	char *slash;

	(void)snprintf(out, PATH_MAX, "%s%s", root, path);
	slash = strrchr(out, '/');
	*slash = 0;
	assert_int_equal(path_make_dirs(out, NULL), 0);
	*slash = '/';
}

/* A file of the machine; device nodes are files to us. */
static void put(const char *path, const char *text)
{
	char at[PATH_MAX];

	path_of(at, path);
	assert_int_equal(path_write_file(at, slice_str(text), 0644, NULL), 0);
}

static void put_link(const char *path, const char *target)
{
	char at[PATH_MAX];

	path_of(at, path);
	assert_return_code(symlink(target, at), errno);
}

static void assert_devices(const char *kind, int count, const char *from, ...)
{
	const char *env[8] = { 0 }, *e;
	struct devices d;
	va_list ap;
	int n = 0;

	va_start(ap, from);
	while ((e = va_arg(ap, const char *)))
		env[n++] = e;
	va_end(ap);
	d = detect_devices(root, (char *const *)env);
	assert_string_equal(d.kind, kind);
	assert_int_equal(d.count, count);
	if (from)
		assert_string_equal(d.from, from);
}

/* --- devices --- */

static void a_machine_without_accelerators_has_none(void **state)
{
	(void)state;
	assert_devices("cpu", 0, "no accelerator", NULL);
	put("/dev/null", "");
	assert_devices("cpu", 0, "no accelerator", "CUDA_VISIBLE_DEVICES=0,1", NULL);
}

static void nvidia_nodes_are_counted_by_number(void **state)
{
	(void)state;
	put("/dev/nvidiactl", "");
	put("/dev/nvidia-uvm", "");
	put("/dev/nvidia-modeset", "");
	put("/dev/nvidia-caps/nvidia-cap1", "");
	assert_devices("cpu", 0, NULL, NULL);
	put("/dev/nvidia0", "");
	assert_devices("cuda", 1, "1 cuda device in /dev", NULL);
	put("/dev/nvidia3", "");
	put("/dev/nvidia11", "");
	assert_devices("cuda", 3, "3 cuda devices in /dev", NULL);
	assert_int_equal(detect_devices(root, NULL).count, 3);
}

static void cuda_visible_devices_is_read_as_cuda_does(void **state)
{
	static const struct {
		const char *value;
		int count;
	} cases[] = {
		{ "0", 1 },
		{ "0,1,2,3", 4 },
		{ "3,1", 2 },
		{ "0,9,1", 1 },
		{ "9", 0 },
		{ "", 0 },
		{ "-1", 0 },
		{ "0,-1,1", 1 },
		{ "0,0", 0 },
		{ "1,2,1", 0 },
		{ "NoDevFiles", 0 },
		{ "0,,1", 1 },
		{ "0, 1", 2 },
		{ "1gpu,2x", 2 },
		{ "GPU-aa,GPU-bb", 2 },
		{ "GPU-aa,GPU-aa", 0 },
		{ "GPU-aa,0,GPU-bb", 1 },
		{ "MIG-x,MIG-y", 1 },
		{ "99999999999999999999", 0 },
		{ "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", 4 },
	};
	char value[128];

	(void)state;
	for (int i = 0; i < 4; i++) {
		(void)snprintf(value, sizeof(value), "/dev/nvidia%d", i);
		put(value, "");
	}
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		(void)snprintf(value, sizeof(value), "CUDA_VISIBLE_DEVICES=%s",
			       cases[i].value);
		assert_devices(cases[i].count ? "cuda" : "cpu", cases[i].count, NULL,
			       value, NULL);
	}
	assert_devices("cuda", 2, "2 of 4 cuda devices in /dev, by CUDA_VISIBLE_DEVICES",
		       "CUDA_VISIBLE_DEVICES=0,1", NULL);
	assert_devices("cpu", 0, "CUDA_VISIBLE_DEVICES hides all 4 cuda devices",
		       "CUDA_VISIBLE_DEVICES=", NULL);
	assert_devices("cuda", 4, "4 cuda devices in /dev", "CUDA_VISIBLE_DEVICE=0",
		       "XCUDA_VISIBLE_DEVICES=0", NULL);
}

static void a_list_of_thousands_is_no_trouble(void **state)
{
	OWN_MEM char *value = malloc(1 << 20);
	int at = sprintf(value, "CUDA_VISIBLE_DEVICES=0");

	(void)state;
	put("/dev/nvidia0", "");
	put("/dev/nvidia1", "");
	for (int i = 2; i < 50000; i++)
		at += sprintf(value + at, ",%d", i);
	assert_devices("cuda", 1, NULL, value, NULL);
	at = sprintf(value, "CUDA_VISIBLE_DEVICES=GPU-0");
	for (int i = 1; i < 50000; i++)
		at += sprintf(value + at, ",GPU-%d", i);
	assert_devices("cuda", 2, NULL, value, NULL);
}

static void put_kfd(int node, int simds, int render)
{
	char path[128], text[128];

	(void)snprintf(path, sizeof(path),
		       "/sys/class/kfd/kfd/topology/nodes/%d/properties", node);
	(void)snprintf(text, sizeof(text),
		       "cpu_cores_count %d\nsimd_count %d\ndrm_render_minor %d\n",
		       simds ? 0 : 64, simds, render);
	put(path, text);
}

static void amd_gpus_are_topology_nodes_with_simds(void **state)
{
	(void)state;
	put_kfd(0, 0, 0);
	put_kfd(1, 416, 128);
	put_kfd(2, 416, 136);
	assert_devices("cpu", 0, NULL, NULL);
	put("/dev/kfd", "");
	put("/dev/dri/renderD128", "");
	/* The second one's node is not in this container. */
	assert_devices("cuda", 1, NULL, NULL);
	put("/dev/dri/renderD136", "");
	assert_devices("cuda", 2, "2 cuda devices in the AMD driver's topology", NULL);
	put_kfd(3, 416, 0);
	assert_devices("cuda", 3, NULL, NULL);
}

static void amd_variables_narrow_one_after_the_other(void **state)
{
	(void)state;
	put("/dev/kfd", "");
	for (int i = 0; i < 4; i++)
		put_kfd(i, 304, 0);
	assert_devices("cuda", 3, NULL, "ROCR_VISIBLE_DEVICES=1,2,3", NULL);
	assert_devices("cuda", 2, NULL, "ROCR_VISIBLE_DEVICES=1,2,3",
		       "HIP_VISIBLE_DEVICES=0,2", NULL);
	/* Only three are left for the second layer, so its 3 names none. */
	assert_devices("cuda", 1, NULL, "ROCR_VISIBLE_DEVICES=1,2,3",
		       "HIP_VISIBLE_DEVICES=0,3", NULL);
	assert_devices("cuda", 2, NULL, "HIP_VISIBLE_DEVICES=0,1",
		       "CUDA_VISIBLE_DEVICES=0", NULL);
	assert_devices("cuda", 1,
		       "1 of 4 cuda devices in the AMD driver's topology, by "
		       "CUDA_VISIBLE_DEVICES",
		       "CUDA_VISIBLE_DEVICES=0", NULL);
	assert_devices("cpu", 0, NULL, "ROCR_VISIBLE_DEVICES=", NULL);
	assert_devices("cuda", 2, NULL, "ROCR_VISIBLE_DEVICES=GPU-a,GPU-b", NULL);
}

static void put_render(int minor, const char *vendor, const char *class,
		       const char *address)
{
	char path[128], target[128], file[160];

	(void)snprintf(path, sizeof(path), "/dev/dri/renderD%d", minor);
	put(path, "");
	(void)snprintf(target, sizeof(target), "../../../devices/pci/%s", address);
	(void)snprintf(path, sizeof(path), "/sys/class/drm/renderD%d/device", minor);
	(void)snprintf(file, sizeof(file), "/sys/devices/pci/%s/vendor", address);
	put(file, vendor);
	(void)snprintf(file, sizeof(file), "/sys/devices/pci/%s/class", address);
	put(file, class);
	put_link(path, target);
}

static void intel_cards_count_and_integrated_gpus_do_not(void **state)
{
	(void)state;
	put_render(128, "0x8086\n", "0x030000\n", "0000:00:02.0");
	put_render(129, "0x10de\n", "0x030000\n", "0000:01:00.0");
	assert_devices("cpu", 0, NULL, NULL);
	put_render(130, "0x8086\n", "0x030000\n", "0000:03:00.0");
	assert_devices("xpu", 1, "1 xpu device in /dev/dri", NULL);
	put_render(131, "0x8086\n", "0x038000\n", "0000:29:00.0");
	assert_devices("xpu", 2, NULL, NULL);
	assert_devices("xpu", 1, NULL, "ZE_AFFINITY_MASK=1", NULL);
	assert_devices("xpu", 1, NULL, "ZE_AFFINITY_MASK=0.0", NULL);
	assert_devices("cpu", 0, NULL, "ZE_AFFINITY_MASK=7", NULL);
	assert_devices("cpu", 0, NULL, "ZE_AFFINITY_MASK=,", NULL);
	assert_devices("xpu", 1, NULL, "ZE_AFFINITY_MASK=,,1,", NULL);
}

static void a_data_centre_card_in_a_virtual_machine_counts(void **state)
{
	(void)state;
	put_render(128, "0x8086\n", "0x038000\n", "0000:00:02.0");
	assert_devices("xpu", 1, NULL, NULL);
}

static void gaudi_is_told_from_other_accel_nodes(void **state)
{
	(void)state;
	put("/dev/accel/accel0", "");
	put("/dev/accel/accel_controlD0", "");
	put("/sys/class/accel/accel0/device/vendor", "0x8086\n"); /* a laptop's NPU */
	assert_devices("cpu", 0, NULL, NULL);
	for (int i = 1; i < 9; i++) {
		char path[64];

		(void)snprintf(path, sizeof(path), "/dev/accel/accel%d", i);
		put(path, "");
		(void)snprintf(path, sizeof(path),
			       "/sys/class/accel/accel%d/device/vendor", i);
		put(path, "0x1da3\n");
	}
	assert_devices("hpu", 8, "8 hpu devices in /dev/accel", NULL);
	assert_devices("hpu", 8, NULL, "HABANA_VISIBLE_DEVICES=all", NULL);
	assert_devices("hpu", 2, NULL, "HABANA_VISIBLE_MODULES=0,1,1", NULL);
}

static void older_gaudi_nodes_are_found(void **state)
{
	(void)state;
	put("/dev/hl0", "");
	put("/dev/hl1", "");
	put("/dev/hl_controlD0", "");
	assert_devices("hpu", 2, "2 hpu devices in /dev", NULL);
}

static void ascend_nodes_are_found(void **state)
{
	(void)state;
	put("/dev/davinci_manager", "");
	put("/dev/davinci0", "");
	put("/dev/davinci1", "");
	assert_devices("npu", 2, "2 npu devices in /dev", NULL);
	assert_devices("npu", 1, NULL, "ASCEND_RT_VISIBLE_DEVICES=1", NULL);
}

static void trainium_is_counted_in_cores(void **state)
{
	(void)state;
	put("/dev/neuron0", "");
	put("/dev/neuron1", "");
	assert_devices("neuron", 4, NULL, NULL); /* two of each, unless known better */
	for (int i = 0; i < 4; i++) {
		char path[96];

		(void)snprintf(path, sizeof(path),
			       "/sys/class/neuron_device/neuron0/neuron_core%d/info", i);
		put(path, "");
	}
	assert_devices("neuron", 6, NULL, NULL);
	assert_devices("neuron", 4, NULL, "NEURON_RT_VISIBLE_CORES=0-3", NULL);
	assert_devices("neuron", 4, NULL, "NEURON_RT_VISIBLE_CORES=0-2,5,9", NULL);
	assert_devices("neuron", 2, NULL, "NEURON_RT_NUM_CORES=2", NULL);
	assert_devices("neuron", 6, NULL, "NEURON_RT_NUM_CORES=32", NULL);
}

static void put_pci(const char *address, const char *device, const char *group)
{
	char path[128];

	(void)snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/vendor", address);
	put(path, "0x1ae0\n");
	(void)snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/device", address);
	put(path, device);
	(void)snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/iommu_group",
		       address);
	put_link(path, group);
}

static void tpu_chips_need_their_vfio_node(void **state)
{
	(void)state;
	put_pci("0000:00:04.0", "0x0042\n", "../../../kernel/iommu_groups/9"); /* a NIC */
	put("/dev/vfio/9", "");
	assert_devices("cpu", 0, NULL, NULL);
	put_pci("0000:00:05.0", "0x0063\n", "../../../kernel/iommu_groups/1");
	put_pci("0000:00:06.0", "0x0063\n", "../../../kernel/iommu_groups/2");
	put("/dev/vfio/vfio", "");
	assert_devices("cpu", 0, NULL, NULL);
	put("/dev/vfio/1", "");
	assert_devices("tpu", 1, "1 tpu device in the PCI bus", NULL);
	put("/dev/vfio/2", "");
	assert_devices("tpu", 2, NULL, NULL);
	assert_devices("tpu", 1, NULL, "TPU_VISIBLE_CHIPS=1", NULL);
}

static void the_newest_tpu_chip_is_two_devices(void **state)
{
	(void)state;
	put_pci("0000:00:05.0", "0x0076\n", "../../../kernel/iommu_groups/1");
	put("/dev/vfio/1", "");
	assert_devices("tpu", 2, NULL, NULL);
}

static void older_tpu_nodes_count_where_a_chip_is(void **state)
{
	(void)state;
	put("/dev/accel0", "");
	put("/dev/accel1", "");
	assert_devices("cpu", 0, NULL, NULL);
	put_pci("0000:00:05.0", "0x005e\n", "../../../kernel/iommu_groups/1");
	assert_devices("tpu", 2, NULL, NULL);
}

static void other_vendors_nodes_are_found(void **state)
{
	(void)state;
	put("/dev/mtgpu.0", "");
	assert_devices("musa", 1, NULL, NULL);
	put("/dev/cambricon_dev0", "");
	put("/dev/cambricon_ctl", "");
	assert_devices("mlu", 1, NULL, NULL);
	assert_devices("musa", 1, NULL, "MLU_VISIBLE_DEVICES=", NULL);
}

static void a_hidden_kind_makes_room_for_the_next(void **state)
{
	(void)state;
	put("/dev/nvidia0", "");
	put("/dev/davinci0", "");
	assert_devices("cuda", 1, NULL, NULL);
	assert_devices("npu", 1, NULL, "CUDA_VISIBLE_DEVICES=-1", NULL);
}

/* --- quotas --- */

#define V2_MOUNT "35 23 0:30 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"

static void without_a_quota_there_is_none(void **state)
{
	(void)state;
	assert_int_equal(detect_quota(root), 0);
	put("/proc/self/cgroup", "0::/job\n");
	assert_int_equal(detect_quota(root), 0);
	put("/proc/self/mountinfo", V2_MOUNT);
	assert_int_equal(detect_quota(root), 0);
	put("/sys/fs/cgroup/job/cpu.max", "max 100000\n");
	assert_int_equal(detect_quota(root), 0);
}

static void a_quota_is_rounded_up_to_cores(void **state)
{
	static const struct {
		const char *text;
		int cores;
	} cases[] = {
		{ "100000 100000", 1 },
		{ "100001 100000", 2 },
		{ "1000 100000", 1 },
		{ "6400000 100000", 64 },
		{ "50000 20000", 3 },
		{ "400000", 4 },
		{ "junk", 0 },
		{ "", 0 },
		{ "-1 100000", 0 },
		{ "100000 0", 0 },
		{ "9223372036854775807 1", INT_MAX },
	};

	(void)state;
	put("/proc/self/cgroup", "0::/job\n");
	put("/proc/self/mountinfo", V2_MOUNT);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		put("/sys/fs/cgroup/job/cpu.max", cases[i].text);
		assert_int_equal(detect_quota(root), cases[i].cores);
	}
}

static void the_tightest_quota_on_the_way_up_counts(void **state)
{
	(void)state;
	put("/proc/self/cgroup", "0::/pod/box/job\n");
	put("/proc/self/mountinfo", V2_MOUNT);
	put("/sys/fs/cgroup/pod/cpu.max", "300000 100000\n");
	put("/sys/fs/cgroup/pod/box/cpu.max", "max 100000\n");
	put("/sys/fs/cgroup/pod/box/job/cpu.max", "800000 100000\n");
	assert_int_equal(detect_quota(root), 3);
	put("/sys/fs/cgroup/other/cpu.max", "100000 100000\n");
	assert_int_equal(detect_quota(root), 3);
	put("/sys/fs/cgroup/cpu.max", "200000 100000\n");
	assert_int_equal(detect_quota(root), 2);
}

static void version_one_quotas_are_read(void **state)
{
	static const char dir[] = "/sys/fs/cgroup/cpu,cpuacct/docker/abc";
	char path[128];

	(void)state;
	put("/proc/self/cgroup",
	    "5:cpuset:/x\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n");
	put("/proc/self/mountinfo",
	    "33 31 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
	    "34 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:5 - cgroup cgroup "
	    "rw,cpu,cpuacct\n");
	(void)snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", dir);
	put(path, "-1\n");
	(void)snprintf(path, sizeof(path), "%s/cpu.cfs_period_us", dir);
	put(path, "50000\n");
	assert_int_equal(detect_quota(root), 0);
	(void)snprintf(path, sizeof(path), "%s/cpu.cfs_quota_us", dir);
	put(path, "125000\n");
	assert_int_equal(detect_quota(root), 3);
}

static void a_mount_of_a_part_of_the_hierarchy_is_understood(void **state)
{
	(void)state;
	put("/proc/self/cgroup", "4:cpu:/docker/abc/sub\n");
	put("/proc/self/mountinfo",
	    "34 31 0:29 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n");
	put("/sys/fs/cgroup/cpu/sub/cpu.cfs_quota_us", "700000\n");
	put("/sys/fs/cgroup/cpu/sub/cpu.cfs_period_us", "100000\n");
	assert_int_equal(detect_quota(root), 7);
	put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "500000\n");
	put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
	assert_int_equal(detect_quota(root), 5);
}

static void a_path_outside_of_the_mount_leaves_the_mount_itself(void **state)
{
	(void)state;
	put("/proc/self/cgroup", "0::/../../elsewhere\n");
	put("/proc/self/mountinfo", V2_MOUNT);
	put("/sys/fs/cgroup/cpu.max", "400000 100000\n");
	put("/sys/cpu.max", "100000 100000\n");
	assert_int_equal(detect_quota(root), 4);
}

static void hybrid_layouts_take_the_tighter_version(void **state)
{
	(void)state;
	put("/proc/self/cgroup", "4:cpu:/job\n0::/job\n");
	put("/proc/self/mountinfo",
	    "34 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
	    "35 31 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
	put("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "300000\n");
	put("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
	assert_int_equal(detect_quota(root), 3);
	put("/sys/fs/cgroup/unified/job/cpu.max", "200000 100000\n");
	assert_int_equal(detect_quota(root), 2);
}

static void a_mount_point_with_blanks_is_read(void **state)
{
	(void)state;
	put("/proc/self/cgroup", "0::/\n");
	put("/proc/self/mountinfo",
	    "35 23 0:30 / /mnt/c\\040g rw - cgroup2 cgroup2 rw\n");
	put("/mnt/c g/cpu.max", "200000 100000\n");
	assert_int_equal(detect_quota(root), 2);
}

static void nonsense_in_proc_is_survived(void **state)
{
	(void)state;
	put("/proc/self/cgroup", "\n:\n::\n0:\nx\n0::/job");
	put("/proc/self/mountinfo", "\n - \n - cgroup2\n1 2 3 - cgroup2 x y\nx - cgroup\n"
				    "1 2 3 / - cgroup2 x y\n\\\\ - - -\n");
	assert_int_equal(detect_quota(root), 0);
}

static void cores_are_those_of_the_affinity_mask(void **state)
{
	cpu_set_t all, one;
	int first = 0;

	(void)state;
	assert_return_code(sched_getaffinity(0, sizeof(all), &all), errno);
	assert_int_equal(detect_cores(root), CPU_COUNT(&all));
	while (!CPU_ISSET(first, &all))
		first++;
	CPU_ZERO(&one);
	CPU_SET(first, &one);
	assert_return_code(sched_setaffinity(0, sizeof(one), &one), errno);
	assert_int_equal(detect_cores(root), 1);
	assert_return_code(sched_setaffinity(0, sizeof(all), &all), errno);
	put("/proc/self/cgroup", "0::/\n");
	put("/proc/self/mountinfo", V2_MOUNT);
	put("/sys/fs/cgroup/cpu.max", "50000 100000\n");
	assert_int_equal(detect_cores(root), 1);
	put("/sys/fs/cgroup/cpu.max", "99999999 100\n");
	assert_int_equal(detect_cores(root), CPU_COUNT(&all));
}

static void the_real_machine_is_read(void **state)
{
	struct devices d = detect_devices("", environ);

	(void)state;
	assert_true(detect_cores("") >= 1);
	assert_true(d.count >= 0 && (d.count > 0) == !!strcmp(d.kind, "cpu"));
}

int main(void)
{
#define ON_MACHINE(f) cmocka_unit_test_setup_teardown(f, make_root, remove_root)
	const struct CMUnitTest tests[] = {
		ON_MACHINE(a_machine_without_accelerators_has_none),
		ON_MACHINE(nvidia_nodes_are_counted_by_number),
		ON_MACHINE(cuda_visible_devices_is_read_as_cuda_does),
		ON_MACHINE(a_list_of_thousands_is_no_trouble),
		ON_MACHINE(amd_gpus_are_topology_nodes_with_simds),
		ON_MACHINE(amd_variables_narrow_one_after_the_other),
		ON_MACHINE(intel_cards_count_and_integrated_gpus_do_not),
		ON_MACHINE(a_data_centre_card_in_a_virtual_machine_counts),
		ON_MACHINE(gaudi_is_told_from_other_accel_nodes),
		ON_MACHINE(older_gaudi_nodes_are_found),
		ON_MACHINE(ascend_nodes_are_found),
		ON_MACHINE(trainium_is_counted_in_cores),
		ON_MACHINE(tpu_chips_need_their_vfio_node),
		ON_MACHINE(the_newest_tpu_chip_is_two_devices),
		ON_MACHINE(older_tpu_nodes_count_where_a_chip_is),
		ON_MACHINE(other_vendors_nodes_are_found),
		ON_MACHINE(a_hidden_kind_makes_room_for_the_next),
		ON_MACHINE(without_a_quota_there_is_none),
		ON_MACHINE(a_quota_is_rounded_up_to_cores),
		ON_MACHINE(the_tightest_quota_on_the_way_up_counts),
		ON_MACHINE(version_one_quotas_are_read),
		ON_MACHINE(a_mount_of_a_part_of_the_hierarchy_is_understood),
		ON_MACHINE(a_path_outside_of_the_mount_leaves_the_mount_itself),
		ON_MACHINE(hybrid_layouts_take_the_tighter_version),
		ON_MACHINE(a_mount_point_with_blanks_is_read),
		ON_MACHINE(nonsense_in_proc_is_survived),
		ON_MACHINE(cores_are_those_of_the_affinity_mask),
		ON_MACHINE(the_real_machine_is_read),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
