#define GRACE_ISA avx512
#include "loops.inl"
