/* Explains a plan that does not fit into memory: plans the run again with single options changed
 * and reports those that fit. */
#include "spec/config/fit.h"

#include <stdio.h>

static double gib(int64_t bytes)
{
    return (double)bytes / (double)(1 << 30);
}

static qd_status planned_bytes(const qd_config *config, int rank, qd_memory_report *memory, qd_strategy *strategy)
{
    qd_arena *arena = NULL;
    qd_program *program;
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_config_build(config, rank, arena, &program);
    if (status == QD_OK)
        status = qd_memory_account(program, memory);
    if (status == QD_OK)
        *strategy = program->strategy;
    qd_arena_destroy(arena);
    return status;
}

/* The largest kinds of buffers, down to 2% of the total. */
static void put_kinds(const qd_memory_report *memory, qd_strbuf *text)
{
    bool listed[QD_BUFFER_KIND_COUNT] = {false};
    for (int n = 0; n < 5; n++) {
        int largest = -1;
        for (int kind = 0; kind < QD_BUFFER_KIND_COUNT; kind++)
            if (!listed[kind] && memory->at_peak[kind] * 50 > memory->total &&
                (largest < 0 || memory->at_peak[kind] > memory->at_peak[largest]))
                largest = kind;
        if (largest < 0)
            break;
        listed[largest] = true;
        qd_strbuf_printf(text, "%s%s %.1f", n ? ", " : " (", qd_buffer_kind_name((qd_buffer_kind)largest),
                         gib(memory->at_peak[largest]));
    }
    if (memory->total > 0)
        qd_strbuf_puts(text, ")");
}

enum { MOST_CHANGES = 24 };

typedef struct change {
    char text[112];
    qd_config config;
} change;

/* The changes to try, the fastest first. */
static int list_changes(const qd_config *config, const qd_strategy *s, change *list)
{
    int count = 0;
    if (s->swiglu != QD_SWIGLU_AGAIN && qd_activation_is_swiglu(config->model.activation)) {
        list[count].config = *config;
        list[count].config.strategy.swiglu = QD_SWIGLU_AGAIN;
        snprintf(list[count].text, sizeof list[count].text, "train.swiglu=again");
        count++;
    }
    const bool casts_once = s->fp8.on && s->fp8.weights != QD_FP8_WEIGHTS_USE;
    if (casts_once) {
        list[count].config = *config;
        list[count].config.strategy.fp8.weights = QD_FP8_WEIGHTS_USE;
        snprintf(list[count].text, sizeof list[count].text, "fp8.weights=use");
        count++;
    }
    static const char *const modes[] = {"none", "selective", "full"};
    for (int mode = (int)s->recompute + 1; mode < QD_RECOMPUTE_COUNT; mode++) {
        list[count].config = *config;
        list[count].config.strategy.recompute = (qd_recompute)mode;
        list[count].config.strategy.recompute_layers = -1;
        snprintf(list[count].text, sizeof list[count].text, "train.recompute=%s", modes[mode]);
        count++;
    }
    for (int zero = s->zero + 1; zero <= 3 && config->world > 1; zero++) {
        list[count].config = *config;
        list[count].config.strategy.zero = zero;
        snprintf(list[count].text, sizeof list[count].text, "parallel.zero=%d", zero);
        count++;
    }
    bool can_split = !s->split_master && !s->offload && s->param != QD_F32 && s->optimizer != QD_OPTIM_MUON;
    if (can_split) {
        list[count].config = *config;
        list[count].config.strategy.split_master = true;
        snprintf(list[count].text, sizeof list[count].text, "train.master=split");
        count++;
    }
    const char *whole = s->split_master ? " train.master=fp32" : ""; /* offloaded master weights are always fp32 */
    if (!s->offload) {
        list[count].config = *config;
        list[count].config.strategy.offload = true;
        list[count].config.strategy.split_master = false;
        snprintf(list[count].text, sizeof list[count].text, "train.offload=optimizer%s", whole);
        count++;
    }
    int64_t smaller[] = {s->micro_batch / 2, s->micro_batch / 4, s->micro_batch / 8, s->micro_batch / 32, s->micro_batch / 256, 1};
    for (int i = 0; i < (int)(sizeof smaller / sizeof *smaller); i++) {
        int64_t size = smaller[i];
        bool divides = size > 0 && size < s->micro_batch && (s->micro_batch * s->micro_batches) % size == 0;
        if (!divides || (i > 0 && size == smaller[i - 1]))
            continue;
        list[count].config = *config;
        list[count].config.strategy.micro_batch = size;
        snprintf(list[count].text, sizeof list[count].text, "train.micro_batch=%lld", (long long)size);
        count++;
    }
    /* The optimizer state, combined with the smallest activations. Several micro-batches would keep
     * copies of weights in fp8. */
    enum { AS_IT_IS, SPLIT, OFFLOADED };
    const char *const texts[] = {"", " train.master=split", " train.offload=optimizer"};
    const bool tried[] = {s->micro_batch > 1, can_split, !s->offload};
    for (int state = AS_IT_IS; state <= OFFLOADED; state++) {
        if (!tried[state])
            continue;
        list[count].config = *config;
        list[count].config.strategy.micro_batch = 1;
        list[count].config.strategy.recompute = QD_RECOMPUTE_FULL;
        list[count].config.strategy.recompute_layers = -1;
        list[count].config.strategy.fp8.weights = casts_once ? QD_FP8_WEIGHTS_USE : s->fp8.weights;
        list[count].config.strategy.offload = s->offload || state == OFFLOADED;
        list[count].config.strategy.split_master = state == SPLIT || (s->split_master && state == AS_IT_IS);
        snprintf(list[count].text, sizeof list[count].text, "train.micro_batch=1 train.recompute=full%s%s%s",
                 casts_once ? " fp8.weights=use" : "", texts[state], state == OFFLOADED ? whole : "");
        count++;
    }
    return count;
}

/* The bytes that count against the limit. */
static int64_t counted(const qd_memory_report *memory, bool host)
{
    return memory->total + (host ? memory->host_total : 0);
}

qd_status qd_fit_explain(const qd_config *config, int rank, int64_t limit, bool host, qd_strbuf *text)
{
    qd_memory_report memory;
    qd_strategy strategy;
    QD_TRY(planned_bytes(config, rank, &memory, &strategy));
    qd_strbuf_printf(text, "the plan needs %.2f GiB", gib(counted(&memory, host)));
    put_kinds(&memory, text);
    qd_strbuf_printf(text, ", %.2f GiB are available", gib(limit));
    change changes[MOST_CHANGES];
    int count = list_changes(config, &strategy, changes), fits = 0;
    for (int i = 0; i < count && fits < 2; i++) {
        qd_memory_report other;
        qd_strategy unused;
        /* Offloading does not help when host memory is short, and terabytes of state would make a
         * program with too many chunks. */
        if (changes[i].config.strategy.offload && !config->strategy.offload && (host || memory.total >> 40 >= 4))
            continue;
        if (planned_bytes(&changes[i].config, rank, &other, &unused) != QD_OK) {
            qd_error_clear();
            continue;
        }
        if (counted(&other, host) > limit)
            continue;
        qd_strbuf_printf(text, "%s%s needs %.2f GiB", fits++ ? ", or " : "; ", changes[i].text, gib(counted(&other, host)));
        if (other.host_total > 0 && !host)
            qd_strbuf_printf(text, " and %.2f GiB of host memory", gib(other.host_total));
    }
    if (!fits)
        qd_strbuf_printf(text,
                         "; neither recomputing nor a smaller train.micro_batch nor train.master=split%s makes it fit: spread it over "
                         "more %s, or use a smaller model or sequence",
                         host ? "" : " nor train.offload", host ? "machines" : "ranks");
    return QD_OK;
}
