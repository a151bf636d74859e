/* The configuration of a run: the keys of a YAML file and of the command line, as one table. */
#ifndef QUADRILLE_CONFIG_H
#define QUADRILLE_CONFIG_H

#include <quadrille/export.h>
#include <quadrille/options.h>

#ifdef __cplusplus
extern "C" {
#endif

/* model.*, data.*, train.*, parallel.*, run.* */
QD_API qd_option_table qd_config_table(void);

/* Names of the model presets, NULL-terminated; `supported_only` leaves out those that this version
 * cannot train. */
QD_API qd_status qd_config_presets(bool supported_only, const char *const **names);

/* A preset that can be trained: how many parameters, and its shape in one line, "32 blocks of 4096,
 * 32 heads, 8 of keys and values". */
QD_API qd_status qd_config_preset_text(const char *name, int64_t *parameters, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
