/* SPDX-License-Identifier: Apache-2.0
 *
 * Raw system calls for the helper. It is freestanding: no libc, no errno, no malloc, no writable static data, so that a
 * clone of it costs a handful of pages. Every wrapper returns what the kernel returns: a value, or -errno.
 */
#ifndef NSBOX_SYS_H
#define NSBOX_SYS_H

#include <asm/unistd.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <linux/signal.h>
#include <linux/stat.h>
#include <linux/time_types.h>
#include <stddef.h>
#include <stdint.h>

#include "arch.h"

#define NSB_CALL(...) NSB_CALL_N(__VA_ARGS__, 0, 0, 0, 0, 0, 0)
#define NSB_CALL_N(n, a, b, c, d, e, f, ...)                                                                           \
    nsb_syscall6((long)(n), (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

/* The kernel's own headers define these for the C library's types only in part; the numbers are ABI. */
#define NSB_SIG_BLOCK 0
#define NSB_SIG_SETMASK 2
#define NSB_CLOCK_MONOTONIC 1
#define NSB_WNOHANG 1
#define NSB_WEXITED 4
#define NSB_WALL 0x40000000

struct nsb_iovec { void *base; size_t len; };
struct nsb_msghdr {
    void *name; int namelen; struct nsb_iovec *iov; size_t iovlen; void *control; size_t controllen; unsigned flags;
};
struct nsb_cmsg { size_t len; int level, type; };
struct nsb_pollfd { int fd; short events, revents; };
struct nsb_rusage {
    int64_t utime_s, utime_us, stime_s, stime_us, maxrss, ixrss, idrss, isrss, minflt, majflt, nswap, inblock, oublock,
        msgsnd, msgrcv, nsignals, nvcsw, nivcsw;
};

#define NSB_POLLIN 1
#define NSB_POLLHUP 16

#define NORETURN __attribute__((noreturn))
#define NOINLINE __attribute__((noinline))
/* Variables start as zeros (-ftrivial-auto-var-init), except buffers that would cost more than they gain: these. */
#if defined __has_attribute
#if __has_attribute(uninitialized)
#define UNSET __attribute__((uninitialized))
#endif
#endif
#ifndef UNSET
#define UNSET
#endif

/* A descriptor that is closed when its scope ends; -1 holds nothing. */
static inline void nsb_close_fd(int *fd)
{
    if (*fd >= 0)
        NSB_CALL(__NR_close, *fd);
}
#define OWNED_FD __attribute__((cleanup(nsb_close_fd))) int

/* Whether what should be an address is -errno. */
static inline int nsb_failed(long address) { return (unsigned long)address > -4096ul; }
static inline long nsb_close(int fd) { return NSB_CALL(__NR_close, fd); }
static inline NORETURN void nsb_exit(int code)
{
    for (;;)
        NSB_CALL(__NR_exit_group, code);
}
static inline uint64_t nsb_now(void)
{
    struct __kernel_timespec t;
    NSB_CALL(__NR_clock_gettime, NSB_CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#endif
