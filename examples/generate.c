/* Text from a trained model, as it comes:
 *
 *     cc generate.c $(pkg-config --cflags --libs quadrille) -o generate
 *     ./generate runs/demo "And God said"
 */
#include <quadrille/generate.h>
#include <stdio.h>
#include <string.h>

static bool print_text(void *context, const char *text, size_t length)
{
    (void)context;
    fwrite(text, 1, length, stdout);
    fflush(stdout);
    return true; /* false would stop */
}

int main(int argc, char **argv)
{
    qd_generate_options options = qd_generate_options_default();
    qd_generate_report report = qd_generate_report_default();
    if (argc < 2) {
        fprintf(stderr, "usage: generate RUN-FOLDER|CHECKPOINT [PROMPT]\n");
        return 2;
    }
    options.model = argv[1];
    options.prompt = argc > 2 ? argv[2] : "";
    options.prompt_length = strlen(options.prompt);
    options.tokens = 60;
    options.temperature = 0.7;
    options.on_text = print_text;
    printf("%s", options.prompt);
    if (qd_generate(&options, &report) != QD_OK) {
        fprintf(stderr, "\ngenerate: %s\n", qd_error_message());
        return 1;
    }
    printf("\n(%lld tokens in %.2f s, weights of step %lld)\n", (long long)report.tokens, report.seconds, (long long)report.step);
    return 0;
}
