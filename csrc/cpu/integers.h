// The integer vocabulary of whichever vectors this path is written in.

#pragma once

#if defined(__AVX512F__)
#include "simd/integers_avx512.h"
#elif defined(__AVX2__)
#include "simd/integers_avx2.h"
#else
#include "simd/integers_generic.h"
#endif
