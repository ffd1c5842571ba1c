#define LORA_SERVE_PATH avx512
#define LORA_SERVE_SIMD "simd/avx512.h"
#include "../path.h"
#include "../paths.h"

namespace lora_serve {

const Kernels kernels_avx512 = avx512::table("avx512");

}  // namespace lora_serve
