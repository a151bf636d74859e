/* The public text formatting functions, under the name that internal code includes. */
#ifndef QD_BASE_TEXT_TEXT_H
#define QD_BASE_TEXT_TEXT_H
#include <quadrille/text.h>
#endif
