#define LORA_SERVE_PATH generic
#define LORA_SERVE_SIMD "simd/generic.h"
#include "../path.h"
#include "../paths.h"

namespace lora_serve {

const Kernels kernels_generic = generic::table(kGenericName);

}  // namespace lora_serve
