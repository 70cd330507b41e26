/* SPDX-License-Identifier: Apache-2.0
 *
 * An input, as tests/fuzz/seeds.py makes the first ones:
 *
 *   u16 n; n bytes: how system calls end (kernel.c)
 *   u8 n; n times struct step: messages on the control sockets
 *   u8: REPAIR, or 0
 *   the rest: a blob
 */
#ifndef NSBOX_FUZZ_HARNESS_H
#define NSBOX_FUZZ_HARNESS_H

#include "kernel_api.h"
#include "nsbox.h"

#include <string.h>

/* size 0: a whole struct nsb_msg; else that many bytes. */
struct step { uint8_t type, n_fds, size; int8_t err; };

enum { REPAIR = 1, MOST_BLOB = 1 << 16 };

static struct {
    const uint8_t *script;
    size_t script_size;
    struct step steps[255];
    unsigned n_steps, next;
    char blob[MOST_BLOB] __attribute__((aligned(16)));
    size_t blob_size;
    int repair;
    struct nsb_msg msg;
} input;

/* 0: too short to mean anything. */
static int read_input(const uint8_t *data, size_t size)
{
    size_t at = 2;
    if (size < 2 || size < at + (input.script_size = data[0] | (size_t)data[1] << 8) + 1)
        return 0;
    input.script = data + at;
    at += input.script_size;
    input.n_steps = data[at++];
    if (size < at + input.n_steps * sizeof *input.steps + 1)
        return 0;
    memcpy(input.steps, data + at, input.n_steps * sizeof *input.steps);
    at += input.n_steps * sizeof *input.steps;
    input.repair = data[at++] & REPAIR;
    input.blob_size = size - at < MOST_BLOB ? size - at : MOST_BLOB;
    memcpy(input.blob, data + at, input.blob_size);
    input.next = 0;
    return 1;
}

/* Most changes of a blob would be refused for one of its numbers only. */
static void repair_command(struct nsb_command *c)
{
    c->magic = NSB_MAGIC;
    c->size = (uint32_t)input.blob_size;
    input.blob[input.blob_size - 1] = 0;
}

static struct packet next_step(void)
{
    if (input.next == input.n_steps)
        return (struct packet){0};
    const struct step step = input.steps[input.next++];
    input.msg = (struct nsb_msg){.type = step.type, .err = step.err, .op = step.n_fds & 1};
    if ((step.type == NSB_MSG_RUN || step.type == NSB_MSG_START) && step.err == 0)
        input.msg.err = (int)input.blob_size;
    return (struct packet){&input.msg, step.size ? step.size : sizeof input.msg, step.n_fds, input.blob, input.blob_size};
}

#endif
