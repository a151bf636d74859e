/* The report of a search as JSON. */
#include <quadrille/plan.h>

static void put_choice(qd_json_writer *w, const char *key, const qd_plan_choice *c)
{
    const struct {
        const char *key;
        int64_t value;
    } numbers[] = {{"dp", c->dp},
                   {"tp", c->tp},
                   {"cp", c->cp},
                   {"pp", c->pp},
                   {"vpp", c->vpp},
                   {"ep", c->ep},
                   {"etp", c->etp},
                   {"zero", c->zero},
                   {"tp_overlap", c->tp_overlap},
                   {"micro_batch", c->micro_batch},
                   {"micro_batches", c->micro_batches},
                   {"memory_bytes", c->memory_bytes}};
    qd_json_object_begin(w, key);
    qd_json_put_string(w, "layout", c->layout);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        qd_json_put_int(w, numbers[i].key, numbers[i].value);
    qd_json_put_string(w, "recompute", c->recompute);
    qd_json_put_string(w, "schedule", c->schedule);
    qd_json_put_string(w, "cp_mode", c->cp_mode);
    qd_json_put_bool(w, "offload", c->offload);
    qd_json_put_int(w, "host_bytes", c->host_bytes);
    qd_json_put_double(w, "step_seconds", c->step_seconds);
    qd_json_put_double(w, "mfu", c->mfu);
    qd_json_put_string(w, "loses", c->loses);
    qd_json_put_bool(w, "fits", c->fits);
    qd_json_end(w);
}

void qd_plan_put_against(qd_json_writer *w, const qd_plan_against *a)
{
    qd_json_object_begin(w, "against");
    qd_json_put_bool(w, "possible", a->possible);
    if (!a->possible) {
        qd_json_put_string(w, "refusal", a->refusal);
    } else {
        put_choice(w, "choice", a->choice);
        qd_json_put_double(w, "behind", a->behind);
    }
    qd_json_list_begin(w, "why");
    for (int i = 0; i < a->why_count; i++)
        qd_json_put_string(w, NULL, a->why[i]);
    qd_json_end(w);
    qd_json_end(w);
}

void qd_plan_report_json(const qd_plan_report *r, qd_strbuf *out)
{
    qd_json_writer w = qd_json_writer_on(out);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "model", r->best->model);
    qd_json_put_int(&w, "gpus", r->best->gpus);
    qd_json_put_int(&w, "tried", r->tried);
    qd_json_put_int(&w, "too_large", r->too_large);
    qd_json_put_int(&w, "refused", r->refused);
    qd_json_put_double(&w, "wall_seconds", r->wall_seconds);
    qd_json_put_bool(&w, "stopped", r->stopped);
    qd_json_put_bool(&w, "late", r->late);
    qd_json_list_begin(&w, "choices");
    for (int i = 0; i < r->count; i++)
        put_choice(&w, NULL, r->choices[i]);
    qd_json_end(&w);
    qd_json_list_begin(&w, "reasons");
    for (int i = 0; i < r->reason_count; i++)
        qd_json_put_string(&w, NULL, r->reasons[i]);
    qd_json_end(&w);
    qd_json_put_string(&w, "next", r->next);
    if (r->against)
        qd_plan_put_against(&w, r->against);
    qd_json_end(&w);
}
