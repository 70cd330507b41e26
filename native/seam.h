/* SPDX-License-Identifier: Apache-2.0
 * What Python calls. Every function answers a value >= 0 or -errno, and touches no Python object: cffi lets the GIL go. */
#ifndef NSBOX_SEAM_H
#define NSBOX_SEAM_H

#include "nsbox.h"

#include <stddef.h>
#include <stdint.h>

/* cdef:begin */
uint32_t nsb_layout(void);
int nsb_landlock_abi(void);
int nsb_zygote_start(int *pid);
int nsb_launch(int zygote, const void *blob, size_t size, const int *fds, unsigned n_fds, struct nsb_msg *answer,
               int *made);
int nsb_ask(int zygote, uint32_t kind, const void *blob, size_t size, const int *fds, unsigned n_fds,
            struct nsb_msg *answer, int *made);
int nsb_join_library(void);
int nsb_receive(int control, struct nsb_msg *msg, int *fds, unsigned room);
int nsb_run(int control, const void *blob, size_t size, const int *fds, unsigned n_fds);
int nsb_start(int control, const void *blob, size_t size, const int *fds, unsigned n_fds);
int nsb_open_in(int root, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve);
int nsb_act_as(unsigned uid, unsigned gid);
int nsb_act_back(void);
long nsb_write(int fd, const void *data, size_t size);
long long nsb_fs_type(int fd);
int nsb_tell(int control, uint32_t type, int value, uint32_t op);
int nsb_floor(int flags, int loopback, const char *program);
/* cdef:end */

#endif
