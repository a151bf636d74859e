/* The configuration of a run: the table of its keys, and the model presets. Nothing here is
 * collective. */
#ifndef QUADRILLE_CONFIG_H
#define QUADRILLE_CONFIG_H

#include <quadrille/export.h>
#include <quadrille/options.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The keys model.*, data.*, train.*, parallel.* and run.*, for qd_options_create(). Static. */
QD_API qd_option_table qd_config_table(void);

/* Lists the names of the model presets, NULL-terminated; the list belongs to the library.
 * supported_only: without those that this version cannot train. */
QD_API qd_status qd_config_presets(bool supported_only, const char *const **names);

/* Describes a preset: its number of parameters, and its shape in one line, "32 blocks of 4096, 32
 * heads, 8 of keys and values". QD_USAGE for an unknown name, QD_UNSUPPORTED for a preset that this
 * version cannot train. */
QD_API qd_status qd_config_preset_text(const char *name, int64_t *parameters, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
