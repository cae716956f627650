#define GRACE_ISA baseline
#include "loops.inl"
