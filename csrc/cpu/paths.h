// The paths this build holds, and which of them this machine can run.

#pragma once

#include "kernels.h"

namespace lora_serve {

// The generic path by the instructions that its compiler had.
#if defined(__aarch64__) || defined(__ARM_NEON)
static constexpr char kGenericName[] = "neon";
#else
static constexpr char kGenericName[] = "scalar";
#endif

extern const Kernels kernels_amx;
extern const Kernels kernels_avx512bf16;
extern const Kernels kernels_avx512vnni;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx2;
extern const Kernels kernels_generic;

constexpr int kMaxPaths = 6;

// Those that run here, fastest first; returns how many. The generic path is always among them.
int usable_paths(const Kernels* (&paths)[kMaxPaths]);

}  // namespace lora_serve
