#define LORA_SERVE_PATH avx512bf16
#define LORA_SERVE_SIMD "simd/avx512.h"
#include "../path.h"
#include "../paths.h"

namespace lora_serve {

const Kernels kernels_avx512bf16 = avx512bf16::table("avx512bf16");

}  // namespace lora_serve
