/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole helper from its first instruction, with one request: for a sandbox, or of another kind. The script says whether the run follows the
 * zygote, its init, init's builder or the payload up to execve(2).
 */
#include "harness.h"
#include "helper.h"

NORETURN void nsb_main(unsigned long *area);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct nsb_request request;
static uint32_t kind;
static int asked;

/* The first step is the request's descriptors, its kind (err) and, by size, a packet that is cut short. */
static struct packet receive(int sock)
{
    if (sock != ZYGOTE_SOCKET)
        return next_step();
    if (asked++ || input.n_steps == 0)
        return (struct packet){0};
    const struct step step = input.steps[input.next++];
    request = (struct nsb_request){NSB_MAGIC, NSB_LAYOUT, (uint32_t)input.blob_size, step.n_fds, kind, 0};
    return (struct packet){&request, step.size ? step.size : sizeof request, step.n_fds, input.blob, input.blob_size};
}

static void program(void)
{
    unsigned long area[8];
    nsb_main(area);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct nsb_plan *plan = (struct nsb_plan *)input.blob;
    if (!read_input(data, size))
        return 0;
    kind = input.n_steps ? (uint8_t)input.steps[0].err : NSB_LAUNCH;
    if (input.repair && kind != NSB_LAUNCH && input.blob_size >= sizeof(struct nsb_command))
        repair_command((struct nsb_command *)(void *)input.blob);
    if (input.repair && kind == NSB_LAUNCH && input.blob_size >= sizeof *plan) {
        plan->magic = NSB_MAGIC;
        plan->layout = NSB_LAYOUT;
        plan->size = (uint32_t)input.blob_size;
        repair_command(&plan->command);
    }
    asked = 0;
    kernel_run(input.script, input.script_size, ZYGOTE_SOCKET, receive, program);
    return 0;
}
