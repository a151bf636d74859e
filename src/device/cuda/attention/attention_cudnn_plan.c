/* From an operation graph to executable plans: cuDNN's heuristics propose engine configurations,
 * and finalizing a configuration compiles its kernel. */
#include "device/cuda/attention/attention_cudnn_impl.h"

#include <stdio.h>
#include <string.h>

typedef cudnnBackendDescriptor_t descriptor;

static void destroy_all(descriptor *descriptors, int count)
{
    for (int i = 0; i < count; i++)
        if (descriptors[i])
            cudnnBackendDestroyDescriptor(descriptors[i]);
}

static qd_status make_all(cudnnBackendDescriptorType_t type, descriptor *descriptors, int count)
{
    for (int i = 0; i < count; i++)
        QD_CUDNN_TRY(cudnnBackendCreateDescriptor(type, &descriptors[i]));
    return QD_OK;
}

enum { KNOBS = CUDNN_KNOB_TYPE_COUNTS };

/* "engine 5 knobs 2=1 13=0": the engine's number and its settings */
static qd_status describe_config(descriptor config, descriptor engine, descriptor *knobs, char *name, size_t size)
{
    int64_t count = 0, index = 0;
    QD_CUDNN_TRY(cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &engine));
    QD_CUDNN_TRY(cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &count, &index));
    QD_CUDNN_TRY(cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, KNOBS,
                                          &count, knobs));
    size_t used = (size_t)snprintf(name, size, "engine %lld knobs", (long long)index);
    for (int64_t i = 0; i < count && i < KNOBS && used < size; i++) {
        cudnnBackendKnobType_t type = CUDNN_KNOB_TYPE_COUNTS;
        int64_t value = 0, one = 0;
        QD_CUDNN_TRY(cudnnBackendGetAttribute(knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, 1, &one, &type));
        QD_CUDNN_TRY(cudnnBackendGetAttribute(knobs[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 1, &one, &value));
        used += (size_t)snprintf(name + used, size - used, " %d=%lld", (int)type, (long long)value);
    }
    return used < size ? QD_OK : QD_FAIL(QD_UNSUPPORTED, "cuDNN: the engine's settings take more than %zu characters", size);
}

static qd_status name_config(descriptor config, char *name, size_t size)
{
    descriptor made[1 + KNOBS] = {NULL};
    qd_status status;
    QD_TRY_DONE(make_all(CUDNN_BACKEND_ENGINE_DESCRIPTOR, made, 1));
    QD_TRY_DONE(make_all(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR, made + 1, KNOBS));
    QD_TRY_DONE(describe_config(config, made[0], made + 1, name, size));
done:
    destroy_all(made, 1 + KNOBS);
    return status;
}

/* False if this engine cannot run the graph after all. */
static bool build_plan(cudnnHandle_t handle, descriptor device, qd_cudnn_plan *plan)
{
    int64_t count = 0;
    if (cudnnBackendCreateDescriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan->plan) != CUDNN_STATUS_SUCCESS) {
        plan->plan = NULL;
        return false;
    }
    if ((!handle || cudnnBackendSetAttribute(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle) ==
                        CUDNN_STATUS_SUCCESS) &&
        (!device || cudnnBackendSetAttribute(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                             1, &device) == CUDNN_STATUS_SUCCESS) &&
        cudnnBackendSetAttribute(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                 &plan->config) == CUDNN_STATUS_SUCCESS &&
        cudnnBackendFinalize(plan->plan) == CUDNN_STATUS_SUCCESS &&
        cudnnBackendGetAttribute(plan->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                                 &plan->workspace_bytes) == CUDNN_STATUS_SUCCESS)
        return true;
    cudnnBackendDestroyDescriptor(plan->plan);
    plan->plan = NULL;
    return false;
}

static qd_status ask_heuristics(descriptor heuristics, descriptor device, const qd_cudnn_graph *graph, int64_t *found,
                                descriptor configs[QD_CUDNN_CANDIDATES])
{
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    QD_CUDNN_TRY(cudnnBackendSetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                          1, &graph->graph));
    QD_CUDNN_TRY(cudnnBackendSetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode));
    if (device)
        QD_CUDNN_TRY(cudnnBackendSetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                              1, &device));
    QD_CUDNN_TRY(cudnnBackendFinalize(heuristics));
    QD_CUDNN_TRY(cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                          QD_CUDNN_CANDIDATES, found, configs));
    if (*found > QD_CUDNN_CANDIDATES)
        *found = QD_CUDNN_CANDIDATES;
    return QD_OK;
}

qd_status qd_cudnn_plans_create(cudnnHandle_t handle, descriptor device, const qd_cudnn_graph *graph, const char *wanted,
                                qd_cudnn_plan plans[QD_CUDNN_CANDIDATES], int *count)
{
    descriptor heuristics = NULL, configs[QD_CUDNN_CANDIDATES] = {NULL};
    int64_t found = 0;
    qd_status status;
    *count = 0;
    QD_TRY_DONE(make_all(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &heuristics, 1));
    QD_TRY_DONE(make_all(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, configs, QD_CUDNN_CANDIDATES));
    QD_TRY_DONE(ask_heuristics(heuristics, device, graph, &found, configs));
    for (int64_t i = 0; i < found; i++) {
        qd_cudnn_plan *plan = &plans[*count];
        QD_TRY_DONE(name_config(configs[i], plan->name, sizeof plan->name));
        if (wanted && strcmp(wanted, plan->name) != 0)
            continue;
        plan->config = configs[i];
        if (!build_plan(handle, device, plan))
            continue;
        configs[i] = NULL; /* owned by the plan now */
        ++*count;
    }
done:
    destroy_all(configs, QD_CUDNN_CANDIDATES);
    destroy_all(&heuristics, 1);
    if (status != QD_OK) {
        for (int i = 0; i < *count; i++)
            qd_cudnn_plan_destroy(&plans[i]);
        *count = 0;
    }
    return status;
}

void qd_cudnn_plan_destroy(qd_cudnn_plan *plan)
{
    if (plan->plan) {
        cudnnBackendDestroyDescriptor(plan->plan);
        cudnnBackendDestroyDescriptor(plan->config);
    }
    plan->plan = NULL;
    plan->config = NULL;
}
