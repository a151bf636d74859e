/* Two executions of a step and the verdict. See gradients.h. */
#include "train/exec/faults/gradients.h"

#include <stdio.h>
#include <stdlib.h>

/* Collective: names the ranks that have found a difference first. Later sums contain what they
 * contributed, so others differ there too. */
static qd_status name_ranks(qd_comm *world, int first, char *text, size_t bytes)
{
    enum { MOST_NAMED = 4 };
    const int size = qd_comm_size(world), rank = qd_comm_rank(world);
    int32_t *found = calloc((size_t)size, sizeof *found), earliest = INT32_MAX;
    if (!found)
        return QD_FAIL(QD_NO_MEMORY, "no memory to compare gradients");
    found[rank] = first >= 0 ? first : INT32_MAX;
    qd_status status = qd_comm_all_gather(world, &found[rank], found, size, QD_I32, NULL);
    for (int r = 0; r < size; r++)
        earliest = found[r] < earliest ? found[r] : earliest;
    text[0] = '\0';
    int named = 0, used = 0;
    for (int r = 0; r < size && status == QD_OK && earliest < INT32_MAX; r++)
        if (found[r] == earliest && named++ < MOST_NAMED)
            used += snprintf(text + used, bytes - (size_t)used, "%s%d", named == 1 ? "the gradients of rank " : ", ", r);
    if (named > MOST_NAMED)
        used += snprintf(text + used, bytes - (size_t)used, " and %d others", named - MOST_NAMED);
    if (named > 0)
        snprintf(text + used, bytes - (size_t)used, " differed when they were recomputed");
    free(found);
    return status;
}

qd_status qd_gradients_twice(qd_interpreter *interpreter, const qd_program *program, qd_comm *world, const qd_step_input *input,
                             qd_step_output *output)
{
    qd_gradient_check check = {.hashes = calloc((size_t)program->action_count, sizeof *check.hashes), .first = -1};
    qd_step_input twice = *input;
    if (!check.hashes)
        return QD_FAIL(QD_NO_MEMORY, "no memory to compare gradients");
    twice.check = &check;
    twice.trace = NULL;
    twice.profile = NULL;
    twice.cpu_seconds = NULL;
    qd_status status = qd_interpret(interpreter, &twice, output);
    twice = *input;
    twice.check = &check;
    check.second = true;
    if (status == QD_OK)
        status = qd_interpret(interpreter, &twice, output);
    free(check.hashes);
    QD_TRY(status);
    status = name_ranks(world, check.first, output->different, sizeof output->different);
    output->torn = status != QD_OK; /* the update has been applied, and nobody knows whether it was right */
    return status;
}
