#ifndef QD_BASE_TEXT_TEXT_H
#define QD_BASE_TEXT_TEXT_H
#include <quadrille/text.h>
#endif
