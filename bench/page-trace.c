/* Writes the numbers of the pages that a program accesses: a plugin for QEMU's user-mode emulator.
 *
 *     cc -O2 -shared -fPIC -o page-trace.so bench/page-trace.c
 *     qemu-x86_64 -plugin ./page-trace.so,out=/dev/fd/3 PROGRAM ARGUMENTS 3>&1 >/dev/null |
 *         memfold-lab policy --record FILE
 *
 * QEMU calls it for every load and store. It keeps those to anonymous memory, leaves out accesses to the
 * pages that a thread used last (`filter=N`, 8 by default), and writes the others as 64-bit integers in
 * the machine's byte order. Buffers of read(2) and write(2) count as accesses. What a program maps again
 * at an address counts as the same page.
 *
 * The declarations are those of QEMU 7.2, version 1 of the interface: `-DPLUGIN_VERSION=2` and more for
 * later releases.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef PLUGIN_VERSION
#define PLUGIN_VERSION 1
#endif
#define EXPORTED __attribute__((visibility("default")))

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { NO_REGISTERS = 0, LOADS_AND_STORES = 3 };
typedef void mem_callback(unsigned cpu, uint32_t info, uint64_t address, void *data);
typedef void syscall_callback(plugin_id id, unsigned cpu, int64_t number, uint64_t a1, uint64_t a2,
			      uint64_t a3, uint64_t a4, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *insn, mem_callback *callback, int registers,
				      int kinds, void *data);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*callback)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_syscall_cb(plugin_id id, syscall_callback *callback);
void qemu_plugin_register_vcpu_syscall_ret_cb(plugin_id id,
					      void (*callback)(plugin_id, unsigned, int64_t, int64_t));
void qemu_plugin_register_atexit_cb(plugin_id id, void (*callback)(plugin_id, void *), void *data);

EXPORTED int qemu_plugin_version = PLUGIN_VERSION;

enum { PAGE_SHIFT = 12, FILTER_MAX = 4096, RANGES_MAX = 65536, BUFFER = 8192 };

static size_t filter = 8;
static __thread uint64_t recent[FILTER_MAX];
static __thread uint64_t read_into;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Anonymous memory as page numbers, in order. */
static struct { uint64_t start, end; } ranges[RANGES_MAX];
static size_t range_count;
static volatile int are_ranges_old = 1;
static uint64_t buffer[BUFFER];
static size_t buffered;
static int out = -1;

static void fail(const char *what)
{
	perror(what);
	_exit(125);
}

/* The emulator maps the program at its own addresses, so its map is the program's. */
static void read_ranges(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[4096];

	if (!maps)
		fail("/proc/self/maps");
	range_count = 0;
	while (fgets(line, sizeof(line), maps)) {
		unsigned long start, end, inode;
		int name = 0;

		if (sscanf(line, "%lx-%lx %*s %*x %*s %lu %n", &start, &end, &inode, &name) < 3 || inode)
			continue;
		if (range_count == RANGES_MAX)
			fail("too many mappings");
		ranges[range_count].start = start >> PAGE_SHIFT;
		ranges[range_count++].end = end >> PAGE_SHIFT;
	}
	fclose(maps);
	are_ranges_old = 0;
}

static int is_anonymous(uint64_t page)
{
	size_t low = 0, high = range_count;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (ranges[middle].end <= page)
			low = middle + 1;
		else
			high = middle;
	}
	return low < range_count && ranges[low].start <= page;
}

static void flush(void)
{
	const char *bytes = (const char *)buffer;
	size_t left = buffered * sizeof(*buffer);

	while (left) {
		ssize_t written = write(out, bytes, left);

		if (written < 0)
			fail("page-trace");
		bytes += written;
		left -= written;
	}
	buffered = 0;
}

static void touch(uint64_t page)
{
	size_t place;

	if (recent[0] == page)
		return;
	for (place = 1; place < filter - 1 && recent[place] != page; place++)
		;
	int is_hit = recent[place] == page;
	memmove(recent + 1, recent, place * sizeof(*recent));
	recent[0] = page;
	if (is_hit)
		return;
	pthread_mutex_lock(&lock);
	if (are_ranges_old)
		read_ranges();
	if (is_anonymous(page)) {
		buffer[buffered++] = page;
		if (buffered == BUFFER)
			flush();
	}
	pthread_mutex_unlock(&lock);
}

static void touch_all(uint64_t start, int64_t length)
{
	if (length <= 0)
		return;
	for (uint64_t page = start >> PAGE_SHIFT; page <= (start + length - 1) >> PAGE_SHIFT; page++)
		touch(page);
}

static void accessed(unsigned cpu, uint32_t info, uint64_t address, void *data)
{
	touch(address >> PAGE_SHIFT);
}

static void translated(plugin_id id, struct qemu_plugin_tb *tb)
{
	for (size_t index = 0; index < qemu_plugin_tb_n_insns(tb); index++)
		qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(tb, index), accessed, NO_REGISTERS,
						 LOADS_AND_STORES, NULL);
}

static void entered(plugin_id id, unsigned cpu, int64_t number, uint64_t a1, uint64_t a2, uint64_t a3,
		    uint64_t a4, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8)
{
	read_into = a2;
	if (number == 1 || number == 18) /* write, pwrite64 */
		touch_all(a2, a3);
}

static void returned(plugin_id id, unsigned cpu, int64_t number, int64_t result)
{
	switch (number) {
	case 0: /* read */
	case 17: /* pread64 */
		touch_all(read_into, result);
		break;
	case 9: /* mmap */
	case 11: /* munmap */
	case 12: /* brk */
	case 25: /* mremap */
		are_ranges_old = 1;
	}
}

static void ended(plugin_id id, void *data)
{
	pthread_mutex_lock(&lock);
	flush();
	pthread_mutex_unlock(&lock);
}

EXPORTED int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv)
{
	for (int index = 0; index < argc; index++) {
		if (!strncmp(argv[index], "out=", 4))
			out = open(argv[index] + 4, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
		else if (!strncmp(argv[index], "filter=", 7))
			filter = strtoul(argv[index] + 7, NULL, 10);
	}
	if (out < 0 || filter < 2 || filter > FILTER_MAX) {
		fprintf(stderr, "page-trace: out=FILE, filter=2..%d\n", FILTER_MAX);
		return 1;
	}
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	qemu_plugin_register_vcpu_syscall_cb(id, entered);
	qemu_plugin_register_vcpu_syscall_ret_cb(id, returned);
	qemu_plugin_register_atexit_cb(id, ended, NULL);
	return 0;
}
