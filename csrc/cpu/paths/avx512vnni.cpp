#define LORA_SERVE_PATH avx512vnni
#define LORA_SERVE_SIMD "simd/avx512.h"
#include "../path.h"
#include "../paths.h"

namespace lora_serve {

const Kernels kernels_avx512vnni = avx512vnni::table("avx512vnni");

}  // namespace lora_serve
