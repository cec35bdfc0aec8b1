/* Sorts more numbers than its limit holds, and checks the result.
 *
 *   crates/capi/install.sh /tmp/memfold &&
 *   cc -O2 crates/capi/examples/sort.c \
 *      $(PKG_CONFIG_PATH=/tmp/memfold/lib/pkgconfig pkg-config --cflags --libs memfold) \
 *      -Wl,-rpath,/tmp/memfold/lib -o /tmp/sort && /tmp/sort [MEGABYTES [LIMIT_MEGABYTES]]
 */
#include <memfold.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int compare(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

static void check(int result) {
    if (result != 0) {
        fprintf(stderr, "sort: %s\n", memfold_error_message());
        exit(1);
    }
}

int main(int argc, char **argv) {
    size_t megabytes = argc > 1 ? strtoul(argv[1], NULL, 10) : 256;
    size_t limit_megabytes = argc > 2 ? strtoul(argv[2], NULL, 10) : megabytes / 2;
    size_t count = (megabytes << 20) / sizeof(uint64_t);
    memfold_options options = {.size = sizeof options, .limit_bytes = limit_megabytes << 20};
    memfold *limit;
    void *memory;
    check(memfold_new(&options, &limit));
    check(memfold_map(limit, count * sizeof(uint64_t), &memory));

    uint64_t *numbers = memory, sum = 0, state = 1;
    for (size_t index = 0; index < count; index++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        numbers[index] = state >> 44;
        sum += numbers[index];
    }
    qsort(numbers, count, sizeof numbers[0], compare);
    for (size_t index = 1; index < count; index++) {
        sum -= numbers[index];
        if (numbers[index - 1] > numbers[index]) {
            fprintf(stderr, "sort: not in order at %zu\n", index);
            return 1;
        }
    }
    if (sum != numbers[0]) {
        fprintf(stderr, "sort: numbers were lost\n");
        return 1;
    }

    /* A buffer for a system call is pinned. */
    int ends[2];
    uint64_t copy[512];
    check(memfold_advise(numbers, 4096, MEMFOLD_PAGE_OUT));
    check(memfold_pin(numbers, 4096));
    if (pipe(ends) != 0 || write(ends[1], numbers, 4096) != 4096 ||
        read(ends[0], copy, 4096) != 4096 || memcmp(copy, numbers, 4096) != 0) {
        perror("sort: a pinned page");
        return 1;
    }
    check(memfold_unpin(numbers, 4096));

    memfold_stats stats = {.size = sizeof stats};
    check(memfold_get_stats(limit, &stats));
    printf("sorted %zu MiB under %zu MiB: at most %llu MiB resident, %llu pages out, %llu in\n",
           megabytes, limit_megabytes, (unsigned long long)(stats.peak_resident_bytes >> 20),
           (unsigned long long)stats.pages_out, (unsigned long long)stats.pages_in);
    check(memfold_unmap(memory));
    memfold_free(limit);
    return 0;
}
