/* What the search leaves behind, as the public report: an object of the library, whose parts can
 * grow because they are read through pointers. */
#include "plan/search_impl.h"

#include <stddef.h>
#include <stdlib.h>

/* A draft and the report that points into it. */
typedef struct plan_object {
    qd_plan_report report;
    qd_plan_draft draft;
    const qd_plan_choice *choices[QD_PLAN_CHOICES];
    const char *reasons[QD_PLAN_REASONS];
} plan_object;

static plan_object *object_of(qd_plan_draft *draft)
{
    return (plan_object *)((char *)draft - offsetof(plan_object, draft));
}

qd_status qd_plan_draft_create(qd_plan_draft **draft)
{
    plan_object *object = calloc(1, sizeof *object);
    if (!object)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a plan");
    *draft = &object->draft;
    return QD_OK;
}

void qd_plan_draft_destroy(qd_plan_draft *draft)
{
    if (draft)
        free(object_of(draft));
}

qd_status qd_plan_publish(qd_status status, qd_plan_draft *draft, qd_plan_report **report)
{
    *report = NULL;
    if (status != QD_OK) {
        qd_plan_draft_destroy(draft);
        return status;
    }
    plan_object *o = object_of(draft);
    for (int i = 0; i < draft->count; i++)
        o->choices[i] = &draft->choices[i];
    for (int i = 0; i < draft->reason_count; i++)
        o->reasons[i] = draft->reasons[i];
    draft->against.choice = &draft->against_choice;
    o->report = (qd_plan_report){
        .choices = o->choices,
        .count = draft->count,
        .best = &draft->best,
        .reasons = o->reasons,
        .reason_count = draft->reason_count,
        .next = draft->next,
        .tried = draft->tried,
        .too_large = draft->too_large,
        .refused = draft->refused,
        .refusal = draft->refusal,
        .wall_seconds = draft->wall_seconds,
        .against = draft->asked ? &draft->against : NULL,
        .nearest = draft->nearest,
        .stopped = draft->stopped,
        .late = draft->late,
    };
    *report = &o->report;
    return QD_OK;
}

void qd_plan_report_destroy(qd_plan_report *report)
{
    free(report); /* the first member of its object */
}
