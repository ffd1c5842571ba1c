#include "paths.h"

#if defined(LORA_SERVE_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lora_serve {

#if defined(LORA_SERVE_AMX) && defined(__linux__)

// Linux gives a process the tiles' registers when it asks for them: all threads have them then.
static bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#endif

// __builtin_cpu_supports asks the operating system too: registers it does not save do not count.
int usable_paths(const Kernels* (&paths)[kMaxPaths]) {
  int count = 0;
#ifdef LORA_SERVE_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  // Cooper Lake alone has bf16 without vbmi; it runs the next path.
  const bool vbmi = bf16 && __builtin_cpu_supports("avx512vbmi");
#if defined(LORA_SERVE_AMX) && defined(__linux__)
  if (vbmi && may_use_tiles()) paths[count++] = &kernels_amx;
#endif
  if (vbmi) paths[count++] = &kernels_avx512bf16;
  if (vnni) paths[count++] = &kernels_avx512vnni;
  if (avx512) paths[count++] = &kernels_avx512;
  if (avx2) paths[count++] = &kernels_avx2;
#endif
  paths[count++] = &kernels_generic;
  return count;
}

}  // namespace lora_serve
