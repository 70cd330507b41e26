/* SPDX-License-Identifier: Apache-2.0
 *
 * What init of a running sandbox does with messages on its control socket, NSB_MSG_RUN and NSB_MSG_START with the blob of
 * a command among them; and the watcher that such a command gets. Whether the first program runs, the first message says.
 */
#include "harness.h"
#include "helper.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { CONTROL = 3, LIFE = 4 };

static struct packet receive(int sock)
{
    (void)sock;
    return next_step();
}

static void program(void)
{
    struct nsb_command none = {.magic = NSB_MAGIC};
    struct command command = {.is = &none, .control = CONTROL, .input = -1, .output = -1, .error = -1, .variables = -1};
    struct watcher init = {.command = &command, .is_init = 1, .life = LIFE, .signals = -1, .null = -1,
                           .pass = {-1, -1, -1}, .payload = input.n_steps && input.steps[0].type == NSB_MSG_START ? -1 : 2};
    if (watch_signals(&init) >= 0)
        watch(&init);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!read_input(data, size))
        return 0;
    if (input.repair && input.blob_size >= sizeof(struct nsb_command))
        repair_command((struct nsb_command *)(void *)input.blob);
    kernel_run(input.script, input.script_size, CONTROL, receive, program);
    return 0;
}
