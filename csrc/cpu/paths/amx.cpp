#define LORA_SERVE_PATH amx
#define LORA_SERVE_SIMD "simd/avx512.h"
#include "../path.h"
#include "../paths.h"

namespace lora_serve {

const Kernels kernels_amx = amx::table("amx");

}  // namespace lora_serve
