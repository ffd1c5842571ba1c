#define LORA_SERVE_PATH avx2
#define LORA_SERVE_SIMD "simd/avx2.h"
#include "../path.h"
#include "../paths.h"

namespace lora_serve {

const Kernels kernels_avx2 = avx2::table("avx2");

}  // namespace lora_serve
