// The step inside captures of the caller's. A capture is begun and ended with the CUDA runtime:
// what torch's own graphs do, without linking libtorch_cuda.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <optional>
#include <sstream>

#include "common/expect_error.hpp"
#include "frontends/libtorch_testing.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::test {
namespace {

/// A captured graph.
class captured_work {
 public:
  /// Captures what `work` enqueues onto torch's current stream, which must not be the default one.
  explicit captured_work(const std::function<void()>& work) {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      work();
    } catch (...) {
      cudaGraph_t partial = nullptr;
      (void)cudaStreamEndCapture(stream, &partial);
      (void)cudaGetLastError();
      if (partial != nullptr) (void)cudaGraphDestroy(partial);
      throw;
    }
    cudaGraph_t graph = nullptr;
    C10_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    C10_CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
    C10_CUDA_CHECK(cudaGraphDestroy(graph));
  }
  ~captured_work() { (void)cudaGraphExecDestroy(executable_); }
  captured_work(const captured_work&) = delete;
  captured_work& operator=(const captured_work&) = delete;

  void replay() const {
    C10_CUDA_CHECK(cudaGraphLaunch(executable_, c10::cuda::getCurrentCUDAStream()));
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

class GpuAdamCapture : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!libtorch::load_torch_cuda_backend(&why_not)) GTEST_SKIP() << why_not;
    stream_.emplace(c10::cuda::getStreamFromPool());
  }

  static torch::Tensor parameter_with_gradient(double gradient = 1.0) {
    const torch::Tensor result = constant_parameter(1.0, torch::kCUDA);
    set_gradient(result, gradient);
    return result;
  }

  std::optional<c10::cuda::CUDAStreamGuard> stream_;
};

/// Parameters of both optimizers of a comparison.
struct twins {
  torch::Tensor captured = make_parameter(random_values({3000}, 1), torch::kCUDA);
  torch::Tensor eager = make_parameter(random_values({3000}, 1), torch::kCUDA);

  void set_gradients(std::uint64_t step) const {
    set_gradient(captured, random_values({3000}, 10 + step));
    set_gradient(eager, random_values({3000}, 10 + step));
  }
};

TEST_F(GpuAdamCapture, ReplaysEqualEagerStepsOnTheGraphOfItsOwn) {
  const twins p;
  Adam optimizer({p.captured}, AdamOptions(0.01).weight_decay(0.1),
                 StepOptions().capturable(true).max_grad_norm(1.0));
  Adam reference({p.eager}, AdamOptions(0.01).weight_decay(0.1), StepOptions().max_grad_norm(1.0));
  p.set_gradients(0);
  optimizer.step();
  reference.step();
  const captured_work graph([&] { optimizer.step(); });
  EXPECT_EQ(optimizer.status().step, 1u);
  for (std::uint64_t step = 1; step < 6; ++step) {
    p.set_gradients(step);
    graph.replay();
    reference.step();
  }
  expect_same_bits(p.captured, p.eager);
  EXPECT_EQ(optimizer.status().step, 6u);
  EXPECT_EQ(optimizer.status().groups.at(0).step, 6u);
  EXPECT_EQ(state_of(optimizer, p.captured).step(), 6);
}

TEST_F(GpuAdamCapture, EagerStepsAndReplaysShareTheirCounts) {
  const twins p;
  Adam optimizer({p.captured}, AdamOptions(0.01), StepOptions().capturable(true));
  Adam reference({p.eager}, AdamOptions(0.01));
  p.set_gradients(0);
  optimizer.prepare();
  const captured_work graph([&] { optimizer.step(); });
  for (std::uint64_t step = 0; step < 6; ++step) {
    p.set_gradients(step);
    if (step % 2 == 0) {
      graph.replay();
    } else {
      optimizer.step();
    }
    reference.step();
  }
  expect_same_bits(p.captured, p.eager);
  EXPECT_EQ(optimizer.status().step, 6u);
}

TEST_F(GpuAdamCapture, DeliveredLearningRateReachesTheNextReplay) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().capturable(true));
  optimizer.prepare();
  const captured_work graph([&] { optimizer.step(); });
  graph.replay();
  optimizer.param_groups()[0].options().set_lr(0.05);
  optimizer.deliver();
  graph.replay();
  expect_elements(p, 0.85, 1e-6);
}

TEST_F(GpuAdamCapture, FirstStepInsideACapture) {
  const twins p;
  p.set_gradients(0);
  Adam optimizer({p.captured}, AdamOptions(0.01));
  Adam reference({p.eager}, AdamOptions(0.01));
  const captured_work graph([&] { optimizer.step(); });
  for (std::uint64_t step = 0; step < 4; ++step) {
    p.set_gradients(step);
    graph.replay();
    reference.step();
  }
  expect_same_bits(p.captured, p.eager);
  EXPECT_EQ(optimizer.status().step, 4u);
}

TEST_F(GpuAdamCapture, MastersMustBePreparedBeforeTheCapture) {
  const torch::Tensor p = make_parameter(torch::ones({8}), torch::kCUDA, torch::kBFloat16);
  set_gradient(p, 1.0);
  Adam optimizer({p}, AdamOptions(0.1).master_weights(true), StepOptions().capturable(true));
  expect_error<usage_error>([&] { captured_work graph([&] { optimizer.step(); }); },
                            {"group 0 parameter 0", "master", "prepare"});
  optimizer.prepare();
  const captured_work graph([&] { optimizer.step(); });
  graph.replay();
  graph.replay();
  expect_elements(state_of(optimizer, p).master(), 0.8, 1e-6);
}

TEST_F(GpuAdamCapture, GraphOfItsOwnRefusesACaptureAndGoesOn) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  expect_error<usage_error>([&] { captured_work graph([&] { optimizer.step(); }); },
                            {"capturable(true)"});
  optimizer.step();
  expect_elements(p, 0.8, 1e-6);
}

TEST_F(GpuAdamCapture, UsesTheGradientsThatExistInsideTheCapture) {
  const torch::Tensor p = parameter_with_gradient(1.0);
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().capturable(true));
  optimizer.step();
  const torch::Tensor eager_gradient = p.grad();
  const torch::Tensor graph_gradient = torch::ones({5}, torch::TensorOptions(torch::kCUDA));
  const captured_work graph([&] {
    p.mutable_grad() = graph_gradient;
    optimizer.step();
  });
  EXPECT_EQ(optimizer.rebinds(), 1u);
  {
    const torch::NoGradGuard no_grad;
    eager_gradient.fill_(100.0);
  }
  graph.replay();
  graph.replay();
  expect_elements(p, 0.7, 1e-6);
}

TEST_F(GpuAdamCapture, MovedGradientAfterACaptureIsRefusedUntilTheCaptureIsAbandoned) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().capturable(true));
  optimizer.prepare();
  {
    const captured_work graph([&] { optimizer.step(); });
    graph.replay();
    const torch::Tensor captured_gradient = p.grad();
    p.mutable_grad() = p.grad().clone();
    expect_error<usage_error>([&] { optimizer.step(); },
                              {"group 0 parameter 0", "gradient moved", "captured"});
    p.mutable_grad() = captured_gradient;
    graph.replay();
    expect_elements(p, 0.8, 1e-6);
    optimizer.add_param_group(OptimizerParamGroup({parameter_with_gradient()}));
    expect_error<usage_error>([&] { optimizer.step(); }, {"another plan", "captured"});
  }
  p.mutable_grad() = p.grad().clone();
  optimizer.abandon_captured_steps();
  optimizer.step();
  expect_elements(p, 0.7, 1e-6);
  EXPECT_EQ(optimizer.status().step, 3u);
  EXPECT_EQ(optimizer.captures(), 2u);
}

TEST_F(GpuAdamCapture, CheckpointLoadedAfterTheCaptureReachesTheNextReplay) {
  const twins p;
  p.set_gradients(0);
  Adam optimizer({p.captured}, AdamOptions(0.01), StepOptions().capturable(true));
  Adam reference({p.eager}, AdamOptions(0.02));
  for (std::uint64_t step = 0; step < 3; ++step) {
    p.set_gradients(step);
    reference.step();
  }
  std::stringstream stream;
  torch::save(reference, stream);
  optimizer.prepare();
  const captured_work graph([&] { optimizer.step(); });
  graph.replay();
  graph.replay();
  {
    const torch::NoGradGuard no_grad;
    p.captured.copy_(p.eager);
  }
  torch::load(optimizer, stream);
  EXPECT_EQ(optimizer.status().step, 3u);
  for (std::uint64_t step = 3; step < 6; ++step) {
    p.set_gradients(step);
    graph.replay();
    reference.step();
  }
  expect_same_bits(p.captured, p.eager);
  EXPECT_EQ(optimizer.status().step, 6u);
  EXPECT_EQ(optimizer.status().groups.at(0).step, 6u);
}

TEST_F(GpuAdamCapture, LearningRateTensorReachesTheNextReplay) {
  const torch::Tensor p = parameter_with_gradient();
  const torch::Tensor rate = torch::full({}, 0.1, torch::TensorOptions(torch::kCUDA));
  Adam optimizer({p}, AdamOptions().lr_tensor(rate), StepOptions().capturable(true));
  optimizer.prepare();
  const captured_work graph([&] { optimizer.step(); });
  graph.replay();
  rate.fill_(0.05);
  graph.replay();
  expect_elements(p, 0.85, 1e-6);
  // Other memory needs another plan.
  rate.set_data(rate.clone());
  expect_error<usage_error>([&] { optimizer.step(); }, {"another plan", "captured"});
}

TEST_F(GpuAdamCapture, LossScaleMovesWithTheReplays) {
  const twins p;
  const StepOptions options = StepOptions().loss_scale(4.0).scaling(
      {.rule = loss_scale_rule::torch_amp, .growth_interval = 2});
  Adam optimizer({p.captured}, AdamOptions(0.01), StepOptions(options).capturable(true));
  Adam reference({p.eager}, AdamOptions(0.01), options);
  const torch::Tensor loss_gradient = torch::empty({3000}, torch::TensorOptions(torch::kCUDA));
  p.set_gradients(0);
  optimizer.set_loss_scale(8.0);
  expect_error<usage_error>(
      [&] { captured_work graph([&] { static_cast<void>(optimizer.loss_scale_tensor()); }); },
      {"loss_scale_tensor", "deliver"});
  optimizer.prepare();
  optimizer.set_loss_scale(4.0);
  optimizer.deliver();
  const captured_work graph([&] {
    p.captured.mutable_grad().copy_(loss_gradient);
    p.captured.mutable_grad().mul_(optimizer.loss_scale_tensor());
    optimizer.step();
  });
  for (std::uint64_t step = 0; step < 8; ++step) {
    loss_gradient.copy_(random_values({3000}, 10 + step));
    if (step == 3) loss_gradient[7].fill_(INFINITY);
    graph.replay();
    set_gradient(p.eager, loss_gradient * reference.loss_scale_tensor());
    reference.step();
  }
  expect_same_bits(p.captured, p.eager);
  const step_status actual = optimizer.status();
  const step_status expected = reference.status();
  EXPECT_EQ(actual.step, 7u);
  EXPECT_EQ(actual.skipped, 1u);
  EXPECT_EQ(actual.next_loss_scale.scale, expected.next_loss_scale.scale);
  EXPECT_EQ(actual.next_loss_scale.growth_tracker, expected.next_loss_scale.growth_tracker);
  EXPECT_EQ(optimizer.loss_scale_tensor().item<float>(), expected.next_loss_scale.scale);
}

TEST_F(GpuAdamCapture, ReplaysWriteRecords) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1),
                 StepOptions().capturable(true).record_capacity(4).measure_norm(true));
  optimizer.prepare();
  const captured_work graph([&] { optimizer.step(); });
  for (int i = 0; i < 3; ++i) graph.replay();
  c10::cuda::getCurrentCUDAStream().synchronize();
  const record_batch batch = optimizer.records();
  ASSERT_EQ(batch.records.size(), 3u);
  EXPECT_EQ(batch.records.back().step, 3u);
  EXPECT_NEAR(batch.records.back().grad_norm, std::sqrt(5.0), 1e-12);
}

TEST_F(GpuAdamCapture, NothingThatWaitsIsAllowedInsideACapture) {
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1), StepOptions().capturable(true));
  optimizer.prepare();
  const captured_work graph([&] {
    expect_error<usage_error>([&] { optimizer.status(); }, {"status", "captured"});
    expect_error<usage_error>([&] { optimizer.deliver(); }, {"deliver", "captured"});
    optimizer.step();
  });
  graph.replay();
  expect_elements(p, 0.9, 1e-6);
}

TEST_F(GpuAdamCapture, StepsFollowEachOtherAcrossStreams) {
  for (const bool capturable : {false, true}) {
    const twins p;
    Adam optimizer({p.captured}, AdamOptions(0.01), StepOptions().capturable(capturable));
    Adam reference({p.eager}, AdamOptions(0.01));
    for (std::uint64_t step = 0; step < 8; ++step) {
      p.set_gradients(step);
      c10::cuda::getCurrentCUDAStream().synchronize();
      {
        const c10::cuda::CUDAStreamGuard other(c10::cuda::getStreamFromPool());
        optimizer.step();
        other.current_stream().synchronize();
      }
      reference.step();
    }
    expect_same_bits(p.captured, p.eager);
  }
}

TEST_F(GpuAdamCapture, WorksOnTheLegacyDefaultStream) {
  stream_.reset();
  const torch::Tensor p = parameter_with_gradient();
  Adam optimizer({p}, AdamOptions(0.1));
  optimizer.step();
  optimizer.step();
  expect_elements(p, 0.8, 1e-6);
}

TEST_F(GpuAdamCapture, RebuildingManyTimesLeavesMemoryFlat) {
  const auto cycle = [] {
    const torch::Tensor p = parameter_with_gradient();
    Adam optimizer({p}, AdamOptions(0.1));
    for (int step = 0; step < 3; ++step) optimizer.step();
    expect_elements(p, 0.7, 1e-6);
  };
  cycle();
  std::size_t before = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&before, &total));
  for (int i = 0; i < 50; ++i) cycle();
  C10_CUDA_CHECK(cudaMemGetInfo(&after, &total));
  EXPECT_LE(before, after + (std::size_t{4} << 20));
}

}  // namespace
}  // namespace stepgraph::test
