#include <gtest/gtest.h>

#include <string>

#include "common/cuda_testing.hpp"
#include "common/storage.hpp"
#include "conformance/large_tensor.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/step_builder.hpp"

// Every finite f32 as a master in two pieces, through the update kernels.
namespace stepgraph::test {
namespace {

using enum storage_format;

class GpuLargeRemainderUpdate : public gpu_test,
                                public ::testing::WithParamInterface<update_signature> {};

// A tuned kernel and the generic one.
INSTANTIATE_TEST_SUITE_P(GpuLarge, GpuLargeRemainderUpdate,
                         ::testing::Values(update_signature{bf16, bf16, remainder, bf16, bf16},
                                           update_signature{bf16, f16, remainder, bf16, bf16}),
                         [](const auto& tested) { return test_name(tested.param); });

TEST_P(GpuLargeRemainderUpdate, StepThatChangesNothingKeepsEveryFiniteMaster) {
  constexpr std::uint32_t count = 1u << 28;
  int device = 0;
  check(cudaGetDevice(&device));
  const device_location here = {device_kind::cuda, device};
  const device_buffer<std::uint16_t> parameter(count);
  const device_buffer<std::uint16_t> gradient(count);
  const device_buffer<std::uint16_t> master(count);
  const device_buffer<std::uint16_t> exp_avg(count);
  const device_buffer<std::uint16_t> exp_avg_sq(count);
  const std::uint32_t one = GetParam().gradient == bf16 ? 0x3f80u : 0x3c00u;
  check(fill(gradient.data(), sizeof(std::uint16_t), count, {one, one, one, one}));

  step_builder builder;
  builder.add_group({.learning_rate = 0.0});
  const auto view = [&](const device_buffer<std::uint16_t>& buffer, storage_format format) {
    return tensor_view{buffer.data(), count, format, here};
  };
  builder.add_tensor(0, {.name = "masters",
                         .parameter = view(parameter, GetParam().parameter),
                         .gradient = view(gradient, GetParam().gradient),
                         .master = view(master, GetParam().master),
                         .exp_avg = view(exp_avg, GetParam().exp_avg),
                         .exp_avg_sq = view(exp_avg_sq, GetParam().exp_avg_sq)});
  const cuda_stream stream;
  check(cudaDeviceSynchronize());
  graph_executor executor(builder.build(), stream.get());
  const device_buffer<unsigned long long> changed(std::vector<unsigned long long>{0});
  for (std::uint32_t part = 0; part < 16; ++part) {
    // The patterns that are no numbers leave NaN in the moments of their elements.
    for (const auto* buffer : {&exp_avg, &exp_avg_sq}) {
      check(cudaMemset(buffer->data(), 0, count * sizeof(std::uint16_t)));
    }
    check(fill_masters(parameter.data(), master.data(), part * count, count));
    check(cudaDeviceSynchronize());
    executor.launch(stream.get());
    stream.synchronize();
    check(count_changed_masters(parameter.data(), master.data(), part * count, count,
                                changed.data()));
    EXPECT_EQ(changed.read()[0], 0u) << "patterns from " << part * count;
  }
  EXPECT_EQ(executor.status().step, 16u);
}

}  // namespace
}  // namespace stepgraph::test
