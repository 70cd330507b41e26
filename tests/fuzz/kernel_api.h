/* SPDX-License-Identifier: Apache-2.0
 * What a harness says to the kernel that kernel.c plays. */
#ifndef NSBOX_FUZZ_KERNEL_API_H
#define NSBOX_FUZZ_KERNEL_API_H

#include <stddef.h>
#include <stdint.h>

/* What comes through a socket: bytes, descriptors beside them, and what the first of these is when it is mapped. */
struct packet { const void *data; size_t size; unsigned n_fds; const void *blob; size_t blob_size; };

/* A descriptor that is open. */
int kernel_open(void);

/* Runs program until it ends. script: how system calls end, one byte or more each, and all well when it is used up.
 * receive: the next packet; size 0 is end-of-file. watched: a socket; between two of its packets no descriptor may leak. */
void kernel_run(const uint8_t *script, size_t size, int watched, struct packet (*receive)(int sock), void (*program)(void));

#endif
