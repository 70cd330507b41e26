/* SPDX-License-Identifier: Apache-2.0
 *
 * What nsb_receive(), in the embedding process, makes of packets from an init that was taken over. Real
 * sockets and descriptors. The input is a row of packets: u8 room for descriptors, u8 descriptors, u8 size / 2, bytes.
 */
#include "seam.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

const unsigned char nsb_helper[1], nsb_join[1];
const unsigned long nsb_helper_size = sizeof nsb_helper, nsb_join_size = sizeof nsb_join;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST = 64 };

static void send_packet(int sock, const void *data, size_t size, unsigned n_fds)
{
    union { struct cmsghdr head; char space[CMSG_SPACE(MOST * sizeof(int))]; } control = {.space = {0}};
    struct iovec iov = {(void *)data, size};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n_fds) {
        control.head = (struct cmsghdr){.cmsg_len = CMSG_LEN(n_fds * sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        for (unsigned i = 0; i < n_fds; i++)
            memcpy(CMSG_DATA(&control.head) + i * sizeof(int), &sock, sizeof sock);
        msg.msg_control = &control;
        msg.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
    }
    if (sendmsg(sock, &msg, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        abort();
}

static int lowest_free(void)
{
    int fd = dup(0);
    close(fd);
    return fd;
}

static void close_kept(const int *kept, int n, unsigned room)
{
    if (n > (int)room)
        abort();
    for (int i = 0; i < n; i++)
        if (fcntl(kept[i], F_GETFD) != FD_CLOEXEC || close(kept[i]) < 0)
            abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int pair[2], kept[MOST + 1], before;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        abort();
    before = lowest_free();
    while (size >= 3) {
        unsigned room = data[0] % MOST, n_fds = data[1] % (MOST + 1);
        size_t length = data[2] * 2u < size - 3 ? data[2] * 2u : size - 3;
        /* On the heap and exactly as large as it may be written: the sanitizer sees more. */
        struct nsb_msg *msg = malloc(sizeof *msg);
        send_packet(pair[1], data + 3, length, n_fds);
        int ret = nsb_receive(pair[0], msg, kept, room);
        if ((ret >= 0) != (length == sizeof *msg && n_fds <= 24 /* MAX_FDS of seam.c */))
            abort();
        if (ret >= 0)
            close_kept(kept, ret, room);
        if (lowest_free() != before) {
            fprintf(stderr, "a descriptor is left open\n");
            abort();
        }
        free(msg);
        data += 3 + length;
        size -= 3 + length;
    }
    close(pair[0]);
    close(pair[1]);
    return 0;
}
