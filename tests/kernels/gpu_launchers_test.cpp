#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "common/cuda_testing.hpp"
#include "kernels/kernel_problem.hpp"
#include "stepgraph/kernels/cuda_launch.hpp"
#include "stepgraph/kernels/host_loops.hpp"

// Every launcher against the host loop of the same name, bit for bit. Buffers have exactly the size
// of their operand, so that memcheck sees every access beside it.
namespace stepgraph {
namespace {

using cuda::launch_order;
using test::check;
using test::device_buffer;
using test::host_block;
using test::host_tensors;
using test::kernel_tensor;
using test::operand_bytes;
using test::operand_set;

class device_tensors {
 public:
  device_tensors(const std::vector<kernel_tensor>& tensors,
                 const std::vector<operand_set>& contents)
      : placed_(tensors, contents),
        descriptors_(placed_.descriptors),
        chunks_(placed_.chunks),
        arrivals_(std::vector<std::uint32_t>(tensors.size(), 0)) {}

  tensor_table_view table() const {
    return {descriptors_.data(), chunks_.data(), chunks_.size(), arrivals_.data()};
  }
  std::vector<operand_bytes> read() const {
    std::vector<operand_bytes> contents;
    for (const device_buffer<std::byte>& buffer : placed_.buffers) {
      contents.push_back(buffer.read());
    }
    return contents;
  }

 private:
  test::placed_tensors<device_buffer<std::byte>> placed_;
  device_buffer<tensor_descriptor> descriptors_;
  device_buffer<chunk_descriptor> chunks_;
  device_buffer<std::uint32_t> arrivals_;
};

/// A copy of a step block in device memory.
class device_block {
 public:
  explicit device_block(const host_block& block)
      : scalars_(std::vector{block.scalars}),
        step_(std::vector{block.step}),
        groups_(block.groups),
        progress_(block.progress),
        terms_(block.terms) {}

  step_block_view view() const {
    return {scalars_.data(),  step_.data(),  groups_.data(),
            progress_.data(), terms_.data(), static_cast<std::uint32_t>(groups_.size())};
  }
  host_block read() const {
    host_block block(groups_.size());
    block.scalars = scalars_.read()[0];
    block.step = step_.read()[0];
    block.groups = groups_.read();
    block.progress = progress_.read();
    block.terms = terms_.read();
    return block;
  }

 private:
  device_buffer<step_scalars> scalars_;
  device_buffer<step_settings> step_;
  device_buffer<group_settings> groups_;
  device_buffer<group_progress> progress_;
  device_buffer<math::adam_terms> terms_;
};

class device_workspace {
 public:
  explicit device_workspace(std::uint64_t chunks)
      : sums_(statistics_blocks(chunks)),
        non_finite_(statistics_blocks(chunks)),
        arrivals_(std::vector<std::uint32_t>{0}) {}

  cuda::grad_stats_workspace view() const {
    return {sums_.data(), non_finite_.data(), arrivals_.data()};
  }

 private:
  device_buffer<double> sums_;
  device_buffer<std::uint32_t> non_finite_;
  device_buffer<std::uint32_t> arrivals_;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void expect_same_block(const host_block& found, const host_block& expected) {
  EXPECT_TRUE(same_bits(std::vector{found.scalars}, std::vector{expected.scalars}))
      << "norm " << found.scalars.grad_norm << ", expected " << expected.scalars.grad_norm;
  EXPECT_TRUE(same_bits(std::vector{found.step}, std::vector{expected.step}));
  EXPECT_TRUE(same_bits(found.groups, expected.groups));
  EXPECT_TRUE(same_bits(found.progress, expected.progress));
  EXPECT_TRUE(same_bits(found.terms, expected.terms));
}

/// Groups of every schedule, mode and correction.
host_block varied_block() {
  host_block block(200);
  for (std::size_t i = 0; i < block.groups.size(); ++i) {
    group_settings& group = block.groups[i];
    group.beta1 = 0.8 + 0.0009 * static_cast<double>(i);
    group.beta2 = 0.99 + 0.00004 * static_cast<double>(i);
    group.flags = static_cast<std::uint32_t>(i % 8);
    group.has_schedule = i % 5 == 0 ? 0 : 1;
    group.schedule = {static_cast<schedule_shape>(i % 3), 0, 1e-6, 1e-3, 1e-5, i % 7, 4 + i % 11};
    block.progress[i].step = i * i;
  }
  block.step.loss_scale = 1024.0;
  block.step.max_grad_norm = 0.5;
  return block;
}

/// Every tuned signature, and some that the generic kernel serves; the conformance suite has all.
std::vector<update_signature> tested_signatures() {
  using enum storage_format;
  std::vector<update_signature> signatures = test::tuned_signatures();
  signatures.push_back({f32, f16, f16, f16, f16, f16});
  signatures.push_back({bf16, f32, none, e4m3, e4m3, e4m3});
  signatures.push_back({e4m3, bf16, none, bf16, e4m3});
  signatures.push_back({e5m2, f32, none, f32, f32, f32});
  signatures.push_back({e5m2, bf16, f16, e4m3, f16});
  signatures.push_back({f16, f16, none, f32, bf16, bf16});
  return signatures;
}

class GpuLaunchers : public test::gpu_test {
 protected:
  test::cuda_stream& stream() {
    if (!stream_) stream_.emplace();
    return *stream_;
  }

 private:
  std::optional<test::cuda_stream> stream_;
};

TEST_F(GpuLaunchers, UpdateGivesTheBitsOfTheHostLoop) {
  for (const update_signature& signature : tested_signatures()) {
    SCOPED_TRACE(name_of(signature));
    const std::vector<kernel_tensor> tensors = {
        {signature, 5, 0, 0},    {signature, 4096, 1, 0}, {signature, 2049, 2, 0},
        {signature, 4097, 0, 1}, {signature, 6000, 1, 2}, {signature, 2048, 2, 3},
    };
    const std::vector<operand_set> contents = test::random_contents(tensors, 41);
    for (const bool zero_gradients : {false, true}) {
      host_block block(3);
      host::advance_step(block.view(), {}, {});
      const device_block on_device(block);
      const host_tensors expected(tensors, contents);
      host::update(expected.host_table(), block.view(), {.zero_gradients = zero_gradients});

      const device_tensors found(tensors, contents);
      check(cuda::launch_update(signature, found.table(), on_device.view(),
                                {.zero_gradients = zero_gradients}, launch_order::full,
                                stream().get()));
      EXPECT_EQ(found.read(), expected.buffers);
    }
  }
}

TEST_F(GpuLaunchers, SkippedUpdateTouchesNothing) {
  for (const update_signature& signature : tested_signatures()) {
    const std::vector<kernel_tensor> tensors = {{signature, 2048, 0, 0}, {signature, 77, 0, 1}};
    const std::vector<operand_set> contents = test::random_contents(tensors, 42);
    host_block block(1);
    block.scalars.skip = 1;
    const device_block on_device(block);
    const device_tensors found(tensors, contents);
    check(cuda::launch_update(signature, found.table(), on_device.view(), {}, launch_order::full,
                              stream().get()));
    EXPECT_EQ(found.read(), host_tensors(tensors, contents).buffers) << name_of(signature);
  }
}

/// Runs grad_stats three times on both sides, so that a counter that is not reset shows.
void expect_same_statistics(const std::vector<kernel_tensor>& tensors,
                            const std::vector<operand_set>& contents, host_block block,
                            cudaStream_t stream) {
  const host_tensors on_host(tensors, contents);
  const device_tensors on_device(tensors, contents);
  const device_workspace workspace(on_host.chunks.size());
  const device_block found(block);
  for (int step = 0; step < 3; ++step) {
    host::advance_step(block.view(), {}, host::grad_stats(on_host.host_table()));
    check(cuda::launch_grad_stats(on_device.table(), workspace.view(), found.view(), {},
                                  launch_order::full, stream));
    expect_same_block(found.read(), block);
  }
}

std::vector<kernel_tensor> tensors_of_every_gradient_format() {
  std::vector<kernel_tensor> tensors;
  for (const storage_format gradient :
       {storage_format::f32, storage_format::f16, storage_format::bf16}) {
    for (const std::uint64_t numel : {1u, 0u, 3u, 2047u, 2048u, 2049u, 9000u}) {
      for (const std::uint64_t offset : {0u, 1u}) {
        update_signature signature;
        signature.gradient = gradient;
        tensors.push_back({signature, numel, 0, offset});
      }
    }
  }
  return tensors;
}

TEST_F(GpuLaunchers, GradStatsGivesTheBitsOfTheHostLoop) {
  const std::vector<kernel_tensor> tensors = tensors_of_every_gradient_format();
  expect_same_statistics(tensors, test::random_contents(tensors, 43), varied_block(),
                         stream().get());
}

TEST_F(GpuLaunchers, GradStatsOfNothingAdvancesTheStep) {
  expect_same_statistics({}, {}, varied_block(), stream().get());
}

TEST_F(GpuLaunchers, GradStatsAddsHugeAndTinyGradientsAlike) {
  std::vector<kernel_tensor> tensors;
  std::vector<operand_set> contents;
  test::integer_generator random(44);
  for (const int lowest : {-126, -60, -42, 38, 60, 110}) {
    tensors.push_back({{}, 3000, 0, 0});
    std::vector<float> values(3000);
    for (float& value : values) value = random.signed_value(lowest, lowest + 8);
    operand_set operands = test::random_operands({}, 3000, random);
    operands[test::gradient_operand] = test::encode(storage_format::f32, values);
    contents.push_back(operands);
  }
  expect_same_statistics(tensors, contents, varied_block(), stream().get());
}

TEST_F(GpuLaunchers, GradStatsFindsNonFiniteElements) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const storage_format gradient :
       {storage_format::f32, storage_format::f16, storage_format::bf16}) {
    update_signature signature;
    signature.gradient = gradient;
    const std::vector<kernel_tensor> tensors = {{signature, 4100, 0, 0}, {signature, 2049, 0, 1}};
    for (const float value : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
      for (const std::uint64_t position : {0u, 2047u, 2048u}) {
        std::vector<operand_set> contents = test::random_contents(tensors, 45);
        const operand_bytes bad = test::encode(gradient, std::span(&value, 1));
        std::memcpy(contents[1][test::gradient_operand].data() + position * bad.size(), bad.data(),
                    bad.size());
        const device_tensors on_device(tensors, contents);
        const device_workspace workspace(on_device.table().chunk_count);
        const device_block block(host_block(2));
        check(cuda::launch_grad_stats(on_device.table(), workspace.view(), block.view(), {},
                                      launch_order::full, stream().get()));
        const host_block found = block.read();
        EXPECT_EQ(found.scalars.skip, 1u) << name_of(gradient) << " " << value << " " << position;
        EXPECT_EQ(found.scalars.skipped, 1u);
        EXPECT_EQ(found.progress[1].step, 0u);
      }
    }
  }
}

// Long lists make a block add several chunks; the tensors share one gradient to keep them small.
TEST_F(GpuLaunchers, GradStatsGivesTheBitsOfTheHostLoopForLongLists) {
  std::vector<float> gradient(64);
  test::integer_generator random(46);
  for (float& value : gradient) value = random.signed_value(-7, 1);
  const device_buffer<float> on_device(gradient);
  for (const std::uint32_t count : {4095u, 4096u, 5001u, 65535u, 65536u, 70003u}) {
    std::vector<chunk_descriptor> chunks;
    std::vector<tensor_descriptor> tensors(64);
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      tensors[t].gradient = gradient.data() + t;
      tensors[t].numel = tensors.size() - t;
    }
    for (std::uint32_t i = 0; i < count; ++i) chunks.push_back({i % 64, 0});
    host_block block(1);
    const device_block found(block);
    host::advance_step(block.view(), {}, host::grad_stats({tensors.data(), chunks.data(), count}));

    for (std::uint32_t t = 0; t < tensors.size(); ++t) tensors[t].gradient = on_device.data() + t;
    const device_buffer<tensor_descriptor> device_descriptors(tensors);
    const device_buffer<chunk_descriptor> device_chunks(chunks);
    const device_workspace workspace(count);
    check(cuda::launch_grad_stats({device_descriptors.data(), device_chunks.data(), count},
                                  workspace.view(), found.view(), {}, launch_order::full,
                                  stream().get()));
    SCOPED_TRACE(count);
    expect_same_block(found.read(), block);
  }
}

/// A batch with a value for every field of some groups and of the step.
std::vector<setting> varied_settings() {
  std::vector<setting> entries;
  for (const std::uint32_t group : {0u, 1u, 127u, 128u, 199u}) {
    const double part = 1.0 / (group + 3.0);
    entries.push_back({group, setting_field::learning_rate, part});
    entries.push_back({group, setting_field::weight_decay, part / 2.0});
    entries.push_back({group, setting_field::beta1, part / 3.0});
    entries.push_back({group, setting_field::beta2, part / 4.0});
    entries.push_back({group, setting_field::eps, part / 5.0});
    entries.push_back({group, setting_field::group_step, group * 3.0});
  }
  entries.push_back({64, setting_field::resume_schedule, 0.0});
  entries.push_back({whole_step, setting_field::loss_scale, 512.0});
  entries.push_back({whole_step, setting_field::max_grad_norm, 0.25});
  entries.push_back({whole_step, setting_field::step, 77.0});
  return entries;
}

TEST_F(GpuLaunchers, AdvanceStepGivesTheBitsOfTheHostLoop) {
  host_block block = varied_block();
  const device_block found(block);
  const std::vector<setting> entries = varied_settings();
  const device_buffer<setting> on_device(entries);
  const auto count = static_cast<std::uint32_t>(entries.size());
  // The third batch repeats the serial of the second and is ignored.
  for (const std::uint64_t serial : {0u, 1u, 1u, 2u}) {
    host::advance_step(block.view(), {entries.data(), count, serial}, {});
    check(cuda::launch_advance_step(found.view(), {on_device.data(), count, serial},
                                    launch_order::full, stream().get()));
    expect_same_block(found.read(), block);
  }
}

TEST_F(GpuLaunchers, ApplySettingsGivesTheBitsOfTheHostLoop) {
  host_block block = varied_block();
  const device_block found(block);
  const std::vector<setting> entries = varied_settings();
  const device_buffer<setting> on_device(entries);
  const auto count = static_cast<std::uint32_t>(entries.size());
  for (const std::uint64_t serial : {0u, 5u}) {
    host::apply_settings(block.view(), {entries.data(), count, serial});
    check(cuda::launch_apply_settings(found.view(), {on_device.data(), count, serial},
                                      stream().get()));
    expect_same_block(found.read(), block);
  }
}

// Steps back to back whose kernels overlap their prologues, many times: a missing wait shows as a
// changed bit sooner or later.
TEST_F(GpuLaunchers, ProgrammaticOrderKeepsTheBitsOverManySteps) {
  const update_signature signature;
  std::vector<kernel_tensor> tensors;
  for (int i = 0; i < 40; ++i)
    tensors.push_back({signature, 4096, static_cast<std::uint32_t>(i % 3), 0});
  const std::vector<operand_set> contents = test::random_contents(tensors, 47);
  host_block block(3);
  block.step.max_grad_norm = 1.0;
  const device_block found(block);
  const host_tensors expected(tensors, contents);
  const device_tensors on_device(tensors, contents);
  const device_workspace workspace(expected.chunks.size());
  for (int step = 0; step < 50; ++step) {
    host::advance_step(block.view(), {}, host::grad_stats(expected.host_table()));
    host::update(expected.host_table(), block.view(), {});
    check(cuda::launch_grad_stats(on_device.table(), workspace.view(), found.view(), {},
                                  launch_order::full, stream().get()));
    check(cuda::launch_update(signature, on_device.table(), found.view(), {},
                              launch_order::programmatic, stream().get()));
  }
  expect_same_block(found.read(), block);
  EXPECT_EQ(on_device.read(), expected.buffers);
}

TEST_F(GpuLaunchers, TunedUpdateKernelsUseNoLocalMemory) {
  for (const update_signature& signature : tested_signatures()) {
    cuda::kernel_resources resources;
    check(cuda::update_kernel_resources(signature, &resources));
    EXPECT_EQ(resources.local_bytes, 0u) << name_of(signature);
    EXPECT_EQ(resources.threads_per_block, static_cast<int>(update_threads));
    EXPECT_GE(resources.max_blocks_per_multiprocessor, 2) << name_of(signature);
  }
}

}  // namespace
}  // namespace stepgraph
