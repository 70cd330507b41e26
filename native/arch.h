/* SPDX-License-Identifier: Apache-2.0
 * All that depends on the processor: the entry point and the system call instruction. */
#ifndef NSBOX_ARCH_H
#define NSBOX_ARCH_H

#if defined(__x86_64__)

static inline long nsb_syscall6(long n, long a, long b, long c, long d, long e, long f)
{
    long ret;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(ret)
                     : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return ret;
}

#define NSB_ENTRY                                                                                                      \
    __asm__(".text\n.globl _start\n.type _start,@function\n_start:\n\txor %ebp,%ebp\n\tand $-16,%rsp\n\tsub $64,%rsp\n\tmov %rsp,%rdi\n\tcall nsb_main\n\thlt\n")

/* Thread-local storage as the compiler expects it: %fs leads to its own address, and the stack guard is at %fs:40. */
static inline void nsb_set_area(unsigned long *area)
{
    area[0] = (unsigned long)area;
    nsb_syscall6(158 /* arch_prctl */, 0x1002 /* ARCH_SET_FS */, (long)area, 0, 0, 0, 0);
}
static inline unsigned long *nsb_area(void)
{
    unsigned long *area;
    __asm__ volatile("mov %%fs:0, %0" : "=r"(area));
    return area;
}

/* clone(2) onto a stack of its own; running is cleared and woken (futex(2)) when the task is gone. The child pops fn and
 * arg from its stack, which is the only thing it shares no word of with us. fn never returns. */
static inline long nsb_thread(long n, unsigned long flags, void *stack_top, void (*fn)(void *), void *arg, int *running)
{
    long ret;
    void **sp = stack_top;
    register long r10 __asm__("r10") = (long)running;
    register long r8 __asm__("r8") = 0;
    *--sp = (void *)fn;
    *--sp = arg;
    __asm__ volatile("syscall\n\ttest %%rax,%%rax\n\tjnz 1f\n\txor %%ebp,%%ebp\n\tpop %%rdi\n\tpop %%rax\n\tcall *%%rax\n\thlt\n1:"
                     : "=a"(ret)
                     : "a"(n), "D"(flags), "S"(sp), "d"(0), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    return ret;
}

#elif defined(__aarch64__)

static inline long nsb_syscall6(long n, long a, long b, long c, long d, long e, long f)
{
    register long x8 __asm__("x8") = n;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory", "cc");
    return x0;
}

#define NSB_ENTRY                                                                                                      \
    __asm__(".text\n.globl _start\n.type _start,%function\n_start:\n\tmov x29,#0\n\tmov x30,#0\n\tsub sp,sp,#64\n\tmov x0,sp\n\tbl nsb_main\n\tbrk #1\n")

/* The stack guard is at tpidr_el0 + 40, as build_ffi.py tells the compiler. */
static inline void nsb_set_area(unsigned long *area) { __asm__ volatile("msr tpidr_el0, %0" : : "r"(area) : "memory"); }
static inline unsigned long *nsb_area(void)
{
    unsigned long *area;
    __asm__ volatile("mrs %0, tpidr_el0" : "=r"(area));
    return area;
}

static inline long nsb_thread(long n, unsigned long flags, void *stack_top, void (*fn)(void *), void *arg, int *running)
{
    void **sp = stack_top;
    register long x8 __asm__("x8") = n;
    register long x0 __asm__("x0") = (long)flags;
    register long x2 __asm__("x2") = 0;
    register long x3 __asm__("x3") = 0;
    register long x4 __asm__("x4") = (long)running;
    *--sp = (void *)fn;
    *--sp = arg;
    register long x1 __asm__("x1") = (long)sp;
    __asm__ volatile("svc #0\n\tcbnz x0, 1f\n\tmov x29, #0\n\tldp x0, x1, [sp], #16\n\tblr x1\n\tbrk #1\n1:"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
                     : "memory", "cc");
    return x0;
}

#else
#error "nsbox knows x86-64 and aarch64; add the entry point and the system call instruction here"
#endif

#endif
