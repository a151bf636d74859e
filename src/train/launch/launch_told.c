/* Reports the loss of a rank even if the training thread is busy, see launch_told.h. */
#include "train/launch/launch_told.h"

#include <time.h>

/* The training thread reports first where it can, because it may know more. */
enum { LOOKS = 30, NS_BETWEEN_LOOKS = 10000000 };

#define PASS(name, ...)                           \
    qd_told *t = context;                         \
    if (!t->to->name)                             \
        return;                                   \
    pthread_mutex_lock(&t->lock);                 \
    t->to->name(t->to->context, __VA_ARGS__);     \
    pthread_mutex_unlock(&t->lock)

static void pass_start(void *context, const qd_train_summary *summary)
{
    PASS(on_start, summary);
}

static void pass_step(void *context, const qd_train_step *step)
{
    qd_journal *journal = ((qd_told *)context)->journal;
    if (journal)
        qd_journal_step(journal, step->step);
    PASS(on_step, step);
}

static void pass_end(void *context, const qd_train_end *end)
{
    PASS(on_end, end);
}

static void pass_prepare(void *context, const char *what, int64_t done, int64_t total)
{
    PASS(on_prepare, what, done, total);
}

static void pass_note(void *context, const char *text)
{
    PASS(on_note, text);
}

static void pass_failure(void *context, const char *message)
{
    PASS(on_failure, message);
}

void qd_told_begin(qd_told *told, const qd_train_observer *to, atomic_int *failure)
{
    *told = (qd_told){.to = to, .failure = failure};
    told->observer = (qd_train_observer){.size = sizeof told->observer, .context = told, .on_start = pass_start, .on_step = pass_step,
                                         .on_end = pass_end, .on_prepare = pass_prepare, .on_note = pass_note,
                                         .on_failure = to->on_failure ? pass_failure : NULL};
    pthread_mutex_init(&told->lock, NULL);
}

void qd_told_end(qd_told *told)
{
    pthread_mutex_destroy(&told->lock);
}

void qd_told_lost(void *told, const char *message)
{
    qd_told *t = told;
    for (int i = 0; i < LOOKS && atomic_load(t->failure) == 0; i++)
        nanosleep(&(struct timespec){.tv_nsec = NS_BETWEEN_LOOKS}, NULL);
    if (t->observer.on_failure && atomic_exchange(t->failure, 1) == 0)
        pass_failure(t, message);
}
