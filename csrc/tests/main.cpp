// Every kernel of every path that this machine runs, in every type. Exit status 1 if any fails.

#include <cstdio>

#include "check.h"
#include "paths.h"

int main() {
  using namespace lora_serve;
  tests::test_thread_pool();
  tests::test_ggml_blocks();
  const Kernels* paths[kMaxPaths];
  const int count = usable_paths(paths);
  for (int i = 0; i < count; ++i) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16}) {
      tests::test_halves(*paths[i], dtype);
      tests::test_linear(*paths[i], dtype);
      tests::test_quantized(*paths[i], dtype);
      tests::test_stored_codes(*paths[i], dtype);
      tests::test_experts(*paths[i], dtype);
      tests::test_lora(*paths[i], dtype);
      tests::test_rowwise(*paths[i], dtype);
      tests::test_attention(*paths[i], dtype);
      tests::test_sampling(*paths[i], dtype);
      tests::test_screening(*paths[i], dtype);
    }
    std::printf("%s: done\n", paths[i]->path);
  }
  std::printf("%d failures\n", tests::num_failures());
  return tests::num_failures() == 0 ? 0 : 1;
}
