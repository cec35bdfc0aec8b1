/* A thread that no tracer can stop: at each byte of its input it waits for a child in its memory (vfork), which waits for the
 * next byte. */
#include <sys/wait.h>
#include <unistd.h>

static char byte;

int main(void)
{
    while (read(STDIN_FILENO, &byte, 1) == 1) {
        pid_t child = vfork();
        if (child == 0)
            _exit(read(STDIN_FILENO, &byte, 1) != 1);
        int status;
        if (child < 0 || waitpid(child, &status, 0) != child || status)
            return 1;
    }
    return 0;
}
