/* Says what it has in LD_PRELOAD, and stays for as many seconds as it is told. It executes itself anew under a
   filter that allows everything, so that memfold neither manages it nor waits for it. */
#include "filter.h"

#include <stdio.h>
#include <stdlib.h>

int main(int count, char **words)
{
    if (!getenv("STAYS")) {
        must(setenv("STAYS", "1", 1), "setenv");
        filter_system_calls(NULL, 0, SECCOMP_RET_ALLOW, SECCOMP_RET_ALLOW);
        must(execv("/proc/self/exe", words), "execv");
    }
    const char *preload = getenv("LD_PRELOAD");
    printf("%s\n", preload ? preload : "none");
    fflush(stdout);
    fclose(stdout);
    sleep(count > 1 ? (unsigned) atoi(words[1]) : 1);
    return 0;
}
