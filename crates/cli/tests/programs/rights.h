/* Messages with descriptors. Include it after _GNU_SOURCE is defined. */
#ifndef RIGHTS_H
#define RIGHTS_H

#include <string.h>
#include <sys/socket.h>

enum { RIGHTS_MOST = 2 };

/* Sends data and up to RIGHTS_MOST descriptors, as sendmsg does. */
static ssize_t send_rights(int socket_, const void *data, size_t length, const int *descriptors, size_t count)
{
    union {
        char bytes[CMSG_SPACE(RIGHTS_MOST * sizeof(int))];
        struct cmsghdr align;
    } control;
    memset(&control, 0, sizeof control);
    struct iovec vector = {(void *)data, length};
    struct msghdr header = {.msg_iov = &vector, .msg_iovlen = 1};
    if (count) {
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *message = CMSG_FIRSTHDR(&header);
        message->cmsg_level = SOL_SOCKET;
        message->cmsg_type = SCM_RIGHTS;
        message->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(message), descriptors, count * sizeof(int));
    }
    return sendmsg(socket_, &header, MSG_NOSIGNAL);
}

#endif
