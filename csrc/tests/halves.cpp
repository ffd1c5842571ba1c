#define LORA_SERVE_PATH halves

#include "halves.h"

#include "simd/generic.h"

#include "blocks.h"
#include "vectors.h"

namespace lora_serve::halves {

// The mutant: WidenedDot with its steps exchanged.
template <class T>
struct LowerFirstDot : WidenedDot<T> {
  using Upper = WidenedDot<T>;
  SIMD_INLINE F32x16 right(U32x16 words, int step) {
    return Upper::right(words, Upper::kSteps - 1 - step);
  }
  SIMD_INLINE F32x16 left(const float* word, int step) {
    return Upper::left(word, Upper::kSteps - 1 - step);
  }
};

template <class Dot, class T>
static void product_by(const T* x, const uint32_t* packed, size_t rows, size_t in_features,
                       size_t out_features, T* y) {
  const size_t words = words_along(in_features, sizeof(T));
  alignas(64) float left[tests::kMostInFeatures];
  for (size_t t = 0; t < rows; ++t) {
    for_each_vector(in_features, [&](size_t k, auto n) {
      store_lanes(left + k, load_lanes(x + t * in_features + k, n), n);
    });
    const PanelProduct<Dot> product{left, in_features, packed, out_features / kLanes, words};
    product_of(product, {0, 1}, {0, product.num_panels},
               [&](size_t, size_t panel, const float* sums) {
                 store(y + t * out_features + panel * kLanes, load(sums));
               });
  }
}

template <class T>
static void product_in(tests::Halves order, const void* x, const uint32_t* packed, size_t rows,
                       size_t in_features, size_t out_features, void* y) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(y);
  if (order == tests::Halves::kUpperFirst) {
    product_by<WidenedDot<T>>(from, packed, rows, in_features, out_features, to);
  } else {
    product_by<LowerFirstDot<T>>(from, packed, rows, in_features, out_features, to);
  }
}

}  // namespace lora_serve::halves

namespace lora_serve::tests {

bool widens_with_fma() {
#ifdef __FP_FAST_FMAF
  return true;
#else
  return false;
#endif
}

void widened_product(Halves order, Dtype dtype, const void* x, const uint32_t* packed, size_t rows,
                     size_t in_features, size_t out_features, void* y) {
  if (dtype == Dtype::kBfloat16) {
    halves::product_in<Bfloat16>(order, x, packed, rows, in_features, out_features, y);
  } else {
    halves::product_in<Float16>(order, x, packed, rows, in_features, out_features, y);
  }
}

}  // namespace lora_serve::tests
