// The operations on a tile of 64 floats, with AVX-512, with AVX2 or as plain loops. All give the
// same bits: single IEEE operations, rounded to nearest even, without contraction.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define GACT_AVX512 1
#define GACT_AVX2 0
#include "lanes_avx512.h"
#elif defined(__AVX2__)
#define GACT_AVX512 0
#define GACT_AVX2 1
#include "lanes_avx2.h"
#else
#define GACT_AVX512 0
#define GACT_AVX2 0
#include "lanes_plain.h"
#endif
