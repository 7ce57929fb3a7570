#include <gtest/gtest.h>
#include <nccl.h>

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "common/ones_on_device.hpp"
#include "stepgraph/cuda/graph_executor.hpp"

// Gradients sharded over devices: NCCL adds up what grad_stats found, inside the captured step.
// With one device the collective has one rank, and is captured and replayed all the same.
namespace stepgraph::test {
namespace {

void check(ncclResult_t result) {
  if (result != ncclSuccess) throw std::runtime_error(ncclGetErrorString(result));
}

/// One rank: a device, its shard of the tensor, its step.
struct rank {
  rank(int index, std::uint64_t numel) : device(index) {
    test::check(cudaSetDevice(device));
    stream.emplace();
    shard.emplace(numel);
  }

  foreign_work all_reduce() {
    return {{"all_reduce", [this](const foreign_context& context) {
               // The total of the one norm group and the number of zeros.
               check(ncclAllReduce(context.totals, context.totals, 2, ncclDouble, ncclSum,
                                   communicator, context.stream));
             }}};
  }
  step_plan plan() const {
    step_builder builder;
    builder.set_options({.max_grad_norm = 1.0, .count_zeros = true, .exchange_totals = true});
    builder.add_tensor(builder.add_group({.learning_rate = 0.1}), shard->operands("shard"));
    builder.add_foreign_work({.name = "all_reduce", .node = "grad_stats"});
    return builder.build();
  }
  void capture() {
    test::check(cudaSetDevice(device));
    executor.emplace(plan(), stream->get(), all_reduce());
  }

  int device;
  std::optional<cuda_stream> stream;
  std::optional<ones_on_device> shard;
  ncclComm_t communicator = nullptr;
  std::optional<graph_executor> executor;
};

class GpuNccl : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    std::string reason;
    const int found = device_count(&reason);
    if (found < GetParam()) {
      GTEST_SKIP() << "needs " << GetParam() << " GPUs, found " << found << " " << reason;
    }
    std::vector<int> devices;
    for (int device = 0; device < GetParam(); ++device) {
      devices.push_back(device);
      ranks_.push_back(std::make_unique<rank>(device, 1000u * (device + 1)));
    }
    std::vector<ncclComm_t> communicators(devices.size());
    check(ncclCommInitAll(communicators.data(), GetParam(), devices.data()));
    for (std::size_t r = 0; r < ranks_.size(); ++r) ranks_[r]->communicator = communicators[r];
    // The first collective connects the ranks, for which all must take part at once.
    const auto connect = [&](double* totals, rank& one) {
      check(ncclAllReduce(totals, totals, 1, ncclDouble, ncclSum, one.communicator,
                          one.stream->get()));
    };
    std::vector<std::unique_ptr<device_buffer<double>>> ones;
    for (const auto& one : ranks_) {
      test::check(cudaSetDevice(one->device));
      ones.push_back(std::make_unique<device_buffer<double>>(std::vector<double>{1.0}));
    }
    check(ncclGroupStart());
    for (std::size_t r = 0; r < ranks_.size(); ++r) connect(ones[r]->data(), *ranks_[r]);
    check(ncclGroupEnd());
    for (const auto& one : ranks_) one->stream->synchronize();
  }
  void TearDown() override {
    for (const auto& one : ranks_) {
      one->executor.reset();
      destroy_communicator(*one);
    }
    ranks_.clear();
    if (!IsSkipped()) test::check(cudaSetDevice(0));
  }
  static void destroy_communicator(rank& one) {
    if (one.communicator != nullptr) check(ncclCommDestroy(one.communicator));
    one.communicator = nullptr;
  }
  void capture() {
    for (const auto& one : ranks_) one->capture();
  }
  void launch(int steps) {
    for (int step = 0; step < steps; ++step) {
      for (const auto& one : ranks_) one->executor->launch(one->stream->get());
    }
    for (const auto& one : ranks_) one->stream->synchronize();
  }

  std::vector<std::unique_ptr<rank>> ranks_;
};

TEST_P(GpuNccl, NormIsThatOfAllDevices) {
  capture();
  launch(3);
  double elements = 0.0;
  for (const auto& one : ranks_) elements += static_cast<double>(one->shard->numel);
  for (const auto& one : ranks_) {
    const step_status status = one->executor->status();
    EXPECT_EQ(status.grad_norm, std::sqrt(elements));
    EXPECT_NEAR(status.clip_coefficient, 1.0 / std::sqrt(elements), 1e-6);
    EXPECT_EQ(status.zeros, 0u);
    EXPECT_EQ(status.step, 3u);
    test::check(cudaSetDevice(one->device));
    EXPECT_NEAR(one->shard->first_parameter(), 0.7, 1e-4);
  }
}

TEST_P(GpuNccl, A22_CommunicatorMayGoAfterTheRelease) {
  capture();
  launch(2);
  for (const auto& one : ranks_) one->executor->release();
  for (const auto& one : ranks_) destroy_communicator(*one);
}

TEST_P(GpuNccl, A22_CommunicatorMayGoAfterTheExecutor) {
  capture();
  launch(2);
  for (const auto& one : ranks_) one->executor.reset();
  for (const auto& one : ranks_) destroy_communicator(*one);
}

INSTANTIATE_TEST_SUITE_P(Devices, GpuNccl, ::testing::Values(1, 2));

}  // namespace
}  // namespace stepgraph::test
