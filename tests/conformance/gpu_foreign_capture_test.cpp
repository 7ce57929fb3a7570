#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "common/expect_error.hpp"
#include "conformance/foreign_kernels.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#include "stepgraph/error.hpp"

// Foreign work that goes wrong in the middle of a capture or of a launch.
namespace stepgraph::test {
namespace {

using foreign_function = std::function<void(const foreign_context&)>;

/// An error that only the test knows.
struct work_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Where in a capture foreign work fails.
struct failing_place {
  const char* name;
  foreign_node node;
  std::uint32_t steps_per_launch;
};

const failing_place places[] = {
    {"First", {"work", foreign_order::before, "grad_stats"}, 1},
    {"Middle", {"work", foreign_order::after, "grad_stats"}, 1},
    {"Last", {"work", foreign_order::after, f32_update}, 1},
    {"IfBody", {"work", foreign_order::after, "grad_stats", true}, 1},
    {"LoopBody", {"work", foreign_order::after, "grad_stats"}, 3},
    {"IfBodyInLoopBody", {"work", foreign_order::after, f32_update, true}, 3},
};

class GpuFailingCapture : public gpu_test, public ::testing::WithParamInterface<failing_place> {
 protected:
  void SetUp() override {
    gpu_test::SetUp();
    if (IsSkipped()) return;
    tensor_.emplace(5000);
    log_.emplace();
    stream_.emplace();
  }

  /// Something to be captured before the failure.
  void enqueue(cudaStream_t stream) const { log_->append(1, stream); }

  graph_executor build(const foreign_function& work) const {
    return {plan_with(*tensor_, {GetParam().node}),
            stream_->get(),
            {{"work", work}},
            {.steps_per_launch = GetParam().steps_per_launch}};
  }

  /// Nothing ran, and streams, thread and device are as they were.
  void expect_untouched() const {
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_FALSE(cuda::is_capturing(stream_->get()));
    EXPECT_TRUE(log_->read().empty());
    for (const auto* buffer : {&tensor_->parameter, &tensor_->gradient}) {
      for (const float value : buffer->read()) ASSERT_EQ(value, 1.0f);
    }
    for (const auto* buffer : {&tensor_->exp_avg, &tensor_->exp_avg_sq}) {
      for (const float value : buffer->read()) ASSERT_EQ(value, 0.0f);
    }
  }

  /// The next executor works.
  void expect_next_succeeds() const {
    graph_executor executor = build([this](cudaStream_t stream) { enqueue(stream); });
    executor.launch(stream_->get());
    stream_->synchronize();
    const std::uint32_t steps = GetParam().steps_per_launch;
    EXPECT_EQ(executor.status().step, steps);
    EXPECT_NEAR(tensor_->first_parameter(), 1.0 - 0.1 * steps, 1e-5);
    EXPECT_EQ(log_->read().size(), steps);
  }

  std::optional<ones_on_device> tensor_;
  std::optional<device_log> log_;
  std::optional<cuda_stream> stream_;
};

INSTANTIATE_TEST_SUITE_P(Places, GpuFailingCapture, ::testing::ValuesIn(places),
                         [](const auto& each) { return std::string(each.param.name); });

TEST_P(GpuFailingCapture, WhatForeignWorkThrowsIsWhatArrives) {
  expect_error<work_error>(
      [&] {
        build([&](cudaStream_t stream) {
          enqueue(stream);
          throw work_error("the first error");
        });
      },
      {"the first error"});
  expect_untouched();
  expect_next_succeeds();
}

TEST_P(GpuFailingCapture, WhatItThrowsAfterAnIllegalCallArrivesToo) {
  expect_error<work_error>(
      [&] {
        build([&](cudaStream_t stream) {
          enqueue(stream);
          if (cudaStreamSynchronize(stream) != cudaSuccess) throw work_error("cannot wait here");
        });
      },
      {"cannot wait here"});
  expect_untouched();
  expect_next_succeeds();
}

TEST_P(GpuFailingCapture, IllegalCallThatNobodyLooksAtNamesTheWork) {
  const std::pair<const char*, foreign_function> illegal[] = {
      {"waits for its stream", [](cudaStream_t stream) { (void)cudaStreamSynchronize(stream); }},
      {"waits for its stream and looks away",
       [](cudaStream_t stream) {
         (void)cudaStreamSynchronize(stream);
         (void)cudaGetLastError();
       }},
      {"allocates",
       [](cudaStream_t) {
         void* memory = nullptr;
         if (cudaMalloc(&memory, 64) == cudaSuccess) (void)cudaFree(memory);
       }},
  };
  for (const auto& [what, work] : illegal) {
    SCOPED_TRACE(what);
    expect_error<capture_error>(
        [&, &broken = work] {
          build([&](const foreign_context& context) {
            enqueue(context.stream);
            broken(context);
          });
        },
        {"'work'", "captur"});
    expect_untouched();
  }
  expect_next_succeeds();
}

TEST_P(GpuFailingCapture, WorkThatEndsTheCaptureIsRefused) {
  expect_error<capture_error>(
      [&] {
        build([&](cudaStream_t stream) {
          enqueue(stream);
          cudaGraph_t graph = nullptr;
          (void)cudaStreamEndCapture(stream, &graph);
          // The graph of a body is not its to destroy.
          if (GetParam().steps_per_launch == 1 && !GetParam().node.only_if_applied) {
            (void)cudaGraphDestroy(graph);
          }
        });
      },
      {"'work'", "ended"});
  expect_untouched();
  expect_next_succeeds();
}

TEST_P(GpuFailingCapture, ForkThatIsNotJoinedNamesTheWork) {
  const cuda_stream side;
  const cuda::unique_event forked = cuda::make_event();
  expect_error<capture_error>(
      [&] {
        build([&](cudaStream_t stream) {
          check(cudaEventRecord(forked.get(), stream));
          check(cudaStreamWaitEvent(side.get(), forked.get(), 0));
          enqueue(side.get());
        });
      },
      {"'work'"});
  EXPECT_FALSE(cuda::is_capturing(side.get()));
  expect_untouched();
  expect_next_succeeds();
}

TEST_P(GpuFailingCapture, TwentyFailuresLeaveNothingBehind) {
  const auto fail = [&](int round) {
    const auto work = [&](cudaStream_t stream) {
      enqueue(stream);
      if (round % 2 == 0) throw work_error("failed");
      (void)cudaStreamSynchronize(stream);
    };
    EXPECT_ANY_THROW(build(work));
  };
  // The driver's own pools fill once.
  for (int round = 0; round < 4; ++round) fail(round);
  const std::int64_t before = free_device_bytes();
  for (int round = 0; round < 20; ++round) fail(round);
  EXPECT_LE(before - free_device_bytes(), 1 << 20);
  expect_untouched();
  expect_next_succeeds();
}

class GpuFailingLaunch : public gpu_test {};

TEST_F(GpuFailingLaunch, ValuesStayPendingUnlessTheStepHadAdvanced) {
  const ones_on_device tensor;
  const cuda_stream stream;
  std::string failing = "early";
  const auto work = [&](const std::string& name) {
    return [&failing, name](cudaStream_t) {
      if (failing == name) throw work_error(name);
    };
  };
  stream_executor executor(plan_with(tensor, {{"early", foreign_order::before, "grad_stats"},
                                              {"late", foreign_order::after, "grad_stats"}}),
                           stream.get(), {{"early", work("early")}, {"late", work("late")}});
  executor.set_learning_rate(0, 0.2);
  expect_error<work_error>([&] { executor.launch(stream.get()); }, {"early"});
  EXPECT_EQ(executor.status().step, 0u);
  failing.clear();
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.8, 1e-5);
  // After the advance the value has arrived, and is not delivered over a later one.
  failing = "late";
  executor.set_learning_rate(0, 0.3);
  expect_error<work_error>([&] { executor.launch(stream.get()); }, {"late"});
  EXPECT_EQ(executor.status().groups[0].learning_rate, 0.3);
  EXPECT_NEAR(tensor.first_parameter(), 0.8, 1e-5);
}

TEST_F(GpuFailingLaunch, ThrowInTheCallersCaptureLeavesTheScopeToClean) {
  const ones_on_device tensor;
  const cuda_stream stream;
  bool fail = true;
  stream_executor executor(plan_with(tensor, {{"work", foreign_order::after, "grad_stats"}}),
                           stream.get(), {{"work", [&](cudaStream_t) {
                                             if (fail) throw work_error("failed");
                                           }}});
  expect_error<work_error>(
      [&] {
        cuda::capture_scope capture(stream.get());
        executor.launch(stream.get());
      },
      {"failed"});
  EXPECT_FALSE(cuda::is_capturing(stream.get()));
  fail = false;
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.9, 1e-5);
}

TEST_F(GpuFailingLaunch, IllegalCallInTheCallersCaptureNamesTheWork) {
  const ones_on_device tensor;
  const cuda_stream stream;
  stream_executor executor(
      plan_with(tensor, {{"work", foreign_order::after, "grad_stats"}}), stream.get(),
      {{"work", [](cudaStream_t work) { (void)cudaStreamSynchronize(work); }}});
  expect_error<capture_error>(
      [&] {
        cuda::capture_scope capture(stream.get());
        executor.launch(stream.get());
      },
      {"'work'", "captur"});
  EXPECT_FALSE(cuda::is_capturing(stream.get()));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  // Eagerly the same call is legal.
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.9, 1e-5);
}

}  // namespace
}  // namespace stepgraph::test
