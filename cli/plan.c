/* Output that check, train, plan and simulate share: model and batch, memory, bars. */
#include "plan.h"

#include <string.h>

void plan_bar(double share, int width, char *text)
{
    static const char *const eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    bool utf8 = cli_utf8();
    int units = (int)((share < 0.0 ? 0.0 : share > 1.0 ? 1.0 : share) * width * 8 + 0.5);
    int cells = 0;
    text[0] = '\0';
    for (; cells < units / 8; cells++)
        strcat(text, utf8 ? "█" : "#");
    if (utf8 && units % 8 != 0) {
        strcat(text, eighths[units % 8]);
        cells++;
    }
    for (; cells < width; cells++)
        strcat(text, " ");
}

int plan_bar_width(int used)
{
    int columns = cli_columns(stdout), left = columns - used;
    return columns == 0 || left > PLAN_BAR ? PLAN_BAR : left < 4 ? 0 : left;
}

void plan_print_head(const qd_check_report *r)
{
    char parameters[32], tokens[32], times[32];
    qd_text_count((double)r->parameters, parameters, sizeof parameters);
    qd_text_count((double)r->tokens_per_step, tokens, sizeof tokens);
    snprintf(times, sizeof times, r->micro_batches == 1 ? "once" : "%lld times", (long long)r->micro_batches);
    printf("model    %s, %s parameters\n", r->model, parameters);
    cli_say("layout", 9, r->world == 1 ? "1 rank" : "%s: %d ranks", r->layout, r->world);
    cli_say("batch", 9, "%lld × %lld = %s tokens per step; a rank computes %lld sequence%s at a time, %s", (long long)r->global_batch,
            (long long)r->seq, tokens, (long long)r->micro_batch, r->micro_batch == 1 ? "" : "s", times);
}

void plan_print_memory(const qd_check_report *r)
{
    char amount[32], bar[4 * PLAN_BAR + 1];
    int width = plan_bar_width(2 + 38 + 1 + 10 + 2 + 1 + 7);
    qd_text_bytes(r->memory_bytes, amount, sizeof amount);
    printf("memory   %s per rank\n", amount);
    for (int i = 0; i < r->line_count; i++) {
        double share = (double)r->lines[i].bytes / (double)(r->memory_bytes > 0 ? r->memory_bytes : 1);
        qd_text_bytes(r->lines[i].bytes, amount, sizeof amount);
        plan_bar(share, width, bar);
        printf("  %-38s %10s  %s %5.1f %%\n", r->lines[i].name, amount, bar, 100.0 * share);
    }
}

void plan_print_host(const qd_check_report *r)
{
    char amount[32];
    qd_text_bytes(r->evaluation_bytes, amount, sizeof amount);
    if (r->evaluation_bytes > 0)
        cli_say("", 9, "evaluations take %s for activations, between steps and in the same memory", amount);
    qd_text_bytes(r->host_bytes, amount, sizeof amount);
    if (r->host_bytes > 0)
        printf("host     %s of host memory per rank in addition: optimizer state\n", amount);
    for (int i = 0; i < r->host_line_count; i++) {
        qd_text_bytes(r->host_lines[i].bytes, amount, sizeof amount);
        printf("  %-38s %10s\n", r->host_lines[i].name, amount);
    }
    qd_text_bytes(r->chunk_bytes, amount, sizeof amount);
    if (r->chunk_bytes > 0)
        printf("  streamed through %s of device memory, which are included above\n", amount);
    qd_text_bytes(r->snapshot_bytes, amount, sizeof amount);
    if (r->snapshot_bytes > 0)
        printf("snapshot %s of host memory per rank in addition: the copy that checkpoints are written from\n", amount);
}
