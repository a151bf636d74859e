/* QD_API marks the functions that the shared libraries export. All other symbols are hidden:
 * objects are compiled with hidden visibility. */
#ifndef QUADRILLE_EXPORT_H
#define QUADRILLE_EXPORT_H

#if defined(__GNUC__)
#define QD_API __attribute__((visibility("default")))
#else
#define QD_API
#endif

#endif
