/* Runs the proof of gradients: first every class of every distinct program, then the actions of
 * every program. */
#include "spec/proof/proof_impl.h"

#include <stdlib.h>

static qd_status no_memory(void)
{
    return QD_FAIL(QD_NO_MEMORY, "no memory to prove the gradients");
}

/* Ranks that share a program are followed once. */
static qd_status list_programs(qd_proof *proof)
{
    int world = proof->mesh->world;
    proof->index = malloc((size_t)world * sizeof *proof->index);
    proof->list = calloc((size_t)world, sizeof *proof->list);
    if (!proof->index || !proof->list)
        return no_memory();
    for (int rank = 0; rank < world; rank++) {
        const qd_program *p = proof->programs[rank];
        int k = p->rank < rank && proof->programs[p->rank] == p ? proof->index[p->rank] : 0;
        while (k < proof->count && proof->list[k].program != p)
            k++;
        if (k == proof->count)
            proof->list[proof->count++].program = p;
        proof->index[rank] = k;
    }
    proof->writers = calloc((size_t)proof->programs[0]->ledger->param_count + 1, sizeof *proof->writers);
    return proof->writers ? QD_OK : no_memory();
}

static qd_status prove_classes(qd_proof *proof, proof_program *of)
{
    const qd_program *p = of->program;
    const qd_ledger *l = p->ledger;
    int stage = qd_mesh_group_coord(proof->mesh, QD_AXIS_BIT(QD_AXIS_PP), p->rank);
    for (int m = 0; m < l->module_count; m++) {
        if (l->modules[m].stage_rank != stage)
            continue;
        proof_class *c = &of->classes[l->modules[m].decl][qd_strategy_recompute(&p->strategy, l, m)];
        if (!c->ops) {
            *c = (proof_class){.program = p, .ops = qd_program_class(p, m), .module = m};
            QD_TRY(qd_proof_walk_class(proof, c));
        }
        int *writers = &proof->writers[l->modules[m].param_begin];
        for (int i = 0; i < l->modules[m].param_count; i++)
            writers[i] = 0;
        for (int k = 0; k < c->write_count; k++)
            for (int i = 0; i < c->writes[k].params; i++)
                writers[c->writes[k].param + i]++;
    }
    return QD_OK;
}

/* Members of a group must reduce the same elements in the same order; each is compared with the
 * first. */
static qd_status compare_reduced(const qd_proof *proof, const proof_program *of)
{
    const qd_program *p = of->program;
    for (int g = 0; g < p->group_count; g++) {
        int rank = qd_group_rank(proof->mesh, p->groups[g], p->rank, 0), k = 0;
        const proof_program *first = &proof->list[proof->index[rank]];
        char name[48];
        while (k < first->program->group_count && !qd_group_equal(first->program->groups[k], p->groups[g]))
            k++;
        if (first == of || of->reduced[g] == (k < first->program->group_count ? first->reduced[k] : 0))
            continue;
        qd_group_name(proof->mesh, p->groups[g], name, sizeof name);
        return QD_FAIL(QD_MISMATCH, "gradients: rank %d and rank %d reduce different elements of gradients over %s", rank,
                       p->rank, name);
    }
    return QD_OK;
}

static void destroy(qd_proof *proof)
{
    for (int i = 0; i < proof->count; i++) {
        for (int decl = 0; decl < QD_DECLARATIONS_MOST; decl++)
            for (int mode = 0; mode < QD_RECOMPUTE_COUNT; mode++) {
                free(proof->list[i].classes[decl][mode].writes);
                free(proof->list[i].classes[decl][mode].reads);
            }
        free(proof->list[i].sent);
    }
    free(proof->list);
    free(proof->index);
    free(proof->writers);
}

qd_status qd_prove_programs(const qd_mesh *mesh, const qd_program *const *programs, qd_proof_report *report)
{
    qd_proof proof = {.mesh = mesh, .programs = programs};
    qd_status status = list_programs(&proof);
    if (status == QD_OK)
        status = qd_proof_frames_create(&proof);
    for (int i = 0; i < proof.count && status == QD_OK; i++)
        status = prove_classes(&proof, &proof.list[i]);
    /* From the last stage to the first, the direction in which gradients of tied parameters are
     * sent. */
    for (int i = proof.count - 1; i >= 0 && status == QD_OK; i--)
        status = qd_proof_step(&proof, &proof.list[i]);
    for (int i = 0; i < proof.count && status == QD_OK; i++)
        status = compare_reduced(&proof, &proof.list[i]);
    if (status == QD_OK && report)
        *report = proof.report;
    destroy(&proof);
    return status;
}
