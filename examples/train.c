/* Training with a loop of one's own: four ranks as threads of this process, losses and checkpoints
 * bit-identical to `quadrille train` with the same settings.
 *
 *     cc train.c $(pkg-config --cflags --libs quadrille) -o train
 *     ./train data.path=corpus.txt train.steps=40 run.dir=runs/mine
 */
#include <quadrille/config.h>
#include <quadrille/session.h>
#include <stdio.h>

/* Settings of the user come on top of these. */
static const char settings[] = "model: {preset: llama-tiny, layers: 2}\n"
                               "data: {seq: 64, validation: 0.1}\n"
                               "train: {global_batch: 8, lr: 3e-3}\n"
                               "parallel: {ranks: 4, zero: 1}\n";

static qd_status configure(int count, char *const *words, qd_options **options)
{
    const qd_option_table table = qd_config_table();
    QD_TRY(qd_options_create(&table, 1, options));
    QD_TRY(qd_options_load_text(*options, "the settings of train.c", settings, sizeof settings - 1));
    for (int i = 0; i < count; i++)
        QD_TRY(qd_options_assign(*options, words[i]));
    return QD_OK;
}

static qd_status train(qd_session *session)
{
    const qd_train_summary *summary = qd_session_summary(session);
    const qd_check_report *plan = summary->plan;
    printf("%s, %lld parameters, %s: %d ranks\n", plan->model, (long long)plan->parameters, plan->layout, plan->world);
    while (qd_session_steps_done(session) < summary->steps) {
        qd_train_step step = qd_train_step_default();
        QD_TRY(qd_session_step(session, &step));
        printf("step %lld  loss %.4f  norm %.3f\n", (long long)step.step, step.loss, step.grad_norm);
        if (step.step % 20 == 0) { /* the held-out part of the text, on the present weights */
            qd_evaluate_report report = qd_evaluate_report_default();
            QD_TRY(qd_session_evaluate(session, NULL, &report));
            printf("held out: loss %.4f, %.3f bits per byte\n", report.loss, report.bits_per_byte);
        }
    }
    return qd_session_finish(session, NULL);
}

static bool print_text(void *context, const char *text, size_t length)
{
    fwrite(text, 1, length, context);
    return true;
}

static qd_status write_sample(qd_session *session)
{
    qd_generate_options options = qd_generate_options_default();
    qd_generate_report report = qd_generate_report_default();
    options.tokens = 80;
    options.on_text = print_text;
    options.callback_context = stdout;
    QD_TRY(qd_session_generate(session, &options, &report));
    putchar('\n');
    return QD_OK;
}

int main(int argc, char **argv)
{
    qd_options *options = NULL;
    qd_session *session = NULL;
    qd_status status = configure(argc - 1, argv + 1, &options);
    if (status == QD_OK)
        status = qd_session_create(options, NULL, &session);
    if (status == QD_OK)
        status = train(session);
    if (status == QD_OK)
        status = write_sample(session);
    if (status != QD_OK)
        fprintf(stderr, "train: %s\n", qd_error_message());
    qd_session_destroy(session);
    qd_options_destroy(options);
    return status == QD_OK ? 0 : 1;
}
