/* SPDX-License-Identifier: Apache-2.0
 *
 * Read in front of each file of the helper (-include): in place of arch.h, which it switches off, system calls go to the
 * kernel that kernel.c plays, and the helper's own memcpy and memset do not replace those of the sanitizers.
 */
#ifndef NSBOX_ARCH_H
#define NSBOX_ARCH_H

#define memset nsb_memset
#define memcpy nsb_memcpy
#define __stack_chk_fail nsb_stack_chk_fail

long nsb_syscall6(long n, long a, long b, long c, long d, long e, long f);
long nsb_thread(long n, unsigned long flags, void *stack_top, void (*fn)(void *), void *arg, int *running);
unsigned long *nsb_area(void);
void nsb_set_area(unsigned long *area);
#define NSB_ENTRY _Static_assert(1, "the harness enters by itself")

#endif
