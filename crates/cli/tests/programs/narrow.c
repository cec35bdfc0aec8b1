/* A 32-bit program without a C library: exits with 7 after three seconds, with an argument
 * never.
 *
 *   cc -m32 -nostdlib -static narrow.c */
enum { EXIT = 1, NANOSLEEP = 162 };

static int call(int number, const void *first, const void *second)
{
    int result;
    __asm__ volatile("int $0x80" : "=a"(result) : "0"(number), "b"(first), "c"(second) : "memory");
    return result;
}

/* `count` is of the words that it was started with. */
__attribute__((used, noreturn)) void begin(int count)
{
    const int second[2] = { 1, 0 };
    for (int slept = 0; slept < 3 || count > 1; slept++)
        call(NANOSLEEP, second, 0);
    for (;;)
        call(EXIT, (const void *)7, 0);
}

/* The kernel leaves that number on the top of the stack, where a call has its first argument. */
__asm__(".globl _start\n_start: call begin\n");
