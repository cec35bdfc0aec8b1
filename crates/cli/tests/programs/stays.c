/* Says what it has in LD_PRELOAD, and stays for as many seconds as it is told. Linked statically, so
   that memfold neither manages it nor waits for it. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **words) {
    const char *preload = getenv("LD_PRELOAD");
    printf("%s\n", preload ? preload : "none");
    fflush(stdout);
    fclose(stdout);
    sleep(count > 1 ? (unsigned) atoi(words[1]) : 1);
    return 0;
}
