#define GRACE_ISA avx2
#include "loops.inl"
