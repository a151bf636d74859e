/* Which functions the shared libraries export. Objects are compiled with hidden visibility, and the
 * functions declared with QD_API are the interface; everything else stays inside. */
#ifndef QUADRILLE_EXPORT_H
#define QUADRILLE_EXPORT_H

#if defined(__GNUC__)
#define QD_API __attribute__((visibility("default")))
#else
#define QD_API
#endif

#endif
