/* Filters on system calls, and what a program must be allowed to set up. */
#ifndef FILTER_H
#define FILTER_H

#include "stamp.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

#define FILTERED_MOST 32

static inline void must(int result, const char *what)
{
    if (result != 0) {
        say("FAILED %s: %s\n", what, strerror(errno));
        _exit(2);
    }
}

/* From now on the kernel answers these system calls in one way, and all others in another. */
static inline void filter_system_calls(const int *listed, unsigned count, unsigned answer, unsigned others)
{
    struct sock_filter filter[2 * FILTERED_MOST + 2];
    unsigned at = 0;
    must(count > FILTERED_MOST, "that many system calls");
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (unsigned i = 0; i < count; i++) {
        filter[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)listed[i], 0, 1);
        filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answer);
    }
    filter[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, others);
    struct sock_fprog program = {(unsigned short)at, filter};
    must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
    must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), "seccomp");
}

#endif
