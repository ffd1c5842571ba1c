// The element types of weights, activations and the KV cache, and the 32-bit words they are read
// in.
//
// Every packed operand is read as vectors of 16 words, one word per column (or token, or channel):
// two neighbours along the summed dimension for the 16-bit types, one element for float. That is
// the form that vdpbf16ps multiplies, and the one that the other paths widen with a shift and a
// mask.

#pragma once

#include <cstddef>
#include <cstdint>

// LORA_SERVE_SMALL_BUILD is for sanitizers: the same code, in fewer copies, or it would compile for
// minutes.
#ifdef LORA_SERVE_SMALL_BUILD
#define SIMD_INLINE static inline
#else
#define SIMD_INLINE static inline __attribute__((always_inline))
#endif

namespace lora_serve {

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// The numbers are part of the binding: ops/cpu/weights.py maps torch's dtypes to them.
enum class Dtype : int { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

constexpr int kLanes = 16;

template <class T>
constexpr int kPerWord = 4 / sizeof(T);

// static: headers that kernels share must not leave behind code that another path's flags compiled.
static constexpr size_t element_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// Before a masked load or store of n elements at p: sanitizers do not look at those.
template <class T>
SIMD_INLINE void show_to_sanitizer([[maybe_unused]] const T* p, [[maybe_unused]] int n) {
#ifdef LORA_SERVE_SMALL_BUILD
  for (int i = 0; i < n; ++i) (void)*reinterpret_cast<const volatile char*>(p + i);
#endif
}

static constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

static constexpr size_t round_up(size_t a, size_t b) { return ceil_div(a, b) * b; }

}  // namespace lora_serve
