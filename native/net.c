/* SPDX-License-Identifier: Apache-2.0
 * The network namespace as it is made has its loopback down. */
#include "helper.h"

enum { AF_INET_FAMILY = 2, SOCK_DGRAM_CLOEXEC = 2 | 02000000, IFF_UP_FLAG = 1, IFF_RUNNING_FLAG = 0x40, SET_FLAGS = 0x8914 };

struct flags_request { char name[16]; short flags; char rest[22]; };

/* Brings lo up; the kernel then adds 127.0.0.1/8, and ::1 where it has IPv6, by itself. */
long loopback_up(void)
{
    struct flags_request request = {.name = "lo"};
    OWNED_FD sock = (int)NSB_CALL(__NR_socket, AF_INET_FAMILY, SOCK_DGRAM_CLOEXEC, 0);
    if (sock < 0)
        return sock;
    request.flags = IFF_UP_FLAG | IFF_RUNNING_FLAG;
    return NSB_CALL(__NR_ioctl, sock, SET_FLAGS, &request);
}
