/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernel itself charges for a process in new namespaces: one clone(2), one execve(2), nothing else. It is the
 * floor that `nsbox bench` compares with, and starts no sandbox.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "seam.h"

#include <errno.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STACK = 65536, NOT_STARTED = 127 };

struct floor_child { const char *program; int loopback; };

static int raise_loopback(void)
{
    struct ifreq request = {.ifr_name = "lo"};
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    request.ifr_flags = IFF_UP;
    return sock < 0 || ioctl(sock, SIOCSIFFLAGS, &request) < 0 ? -1 : 0;
}

/* Runs in the caller's memory while the caller's thread stands still, as a child of vfork(2) does. */
static int in_child(void *argument)
{
    const struct floor_child *child = argument;
    char *argv[] = {(char *)child->program, NULL}, *envp[] = {NULL};
    if (!child->loopback || raise_loopback() == 0)
        execve(child->program, argv, envp);
    _exit(NOT_STARTED);
}

/* Starts program in the namespaces of flags and waits for it; answers its wait status. No handler of the caller's runs in
 * the child, which shares its memory: every signal is blocked meanwhile, and stays so in program. */
int nsb_floor(int flags, int loopback, const char *program)
{
    struct floor_child child = {program, loopback};
    sigset_t all, before;
    int status = 0;
    char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (stack == MAP_FAILED)
        return -errno;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int pid = clone(in_child, stack + STACK, flags | CLONE_VM | CLONE_VFORK | SIGCHLD, &child);
    int ret = pid < 0 ? -errno : 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    while (ret == 0 && waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            ret = -errno;
    munmap(stack, STACK);
    return ret < 0 ? ret : status;
}
