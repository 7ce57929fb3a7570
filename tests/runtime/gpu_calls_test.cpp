#include <cupti.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "common/ones_on_device.hpp"
#include "stepgraph/cuda/graph_executor.hpp"

// What the library asks of the CUDA runtime, as a profiler sees it.
namespace stepgraph::test {
namespace {

using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;

using call_counts = std::map<std::string, int>;

/// Counts the runtime calls of every thread while it lives.
class call_counter {
 public:
  call_counter() {
    check(cuptiSubscribe(&subscriber_, &call_counter::note, this));
    check(cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_RUNTIME_API));
  }
  ~call_counter() { static_cast<void>(cuptiUnsubscribe(subscriber_)); }
  call_counter(const call_counter&) = delete;
  call_counter& operator=(const call_counter&) = delete;

  /// Names without the version that CUPTI gives them: "cudaGraphLaunch".
  const call_counts& counts() const { return counts_; }

 private:
  static void check(CUptiResult result) {
    if (result == CUPTI_SUCCESS) return;
    const char* text = "";
    static_cast<void>(cuptiGetResultString(result, &text));
    throw std::runtime_error(text);
  }
  static void CUPTIAPI note(void* self, CUpti_CallbackDomain, CUpti_CallbackId, const void* data) {
    const auto& call = *static_cast<const CUpti_CallbackData*>(data);
    if (call.callbackSite != CUPTI_API_ENTER) return;
    const std::string name = call.functionName;
    ++static_cast<call_counter*>(self)->counts_[name.substr(0, name.find("_v"))];
  }

  CUpti_SubscriberHandle subscriber_ = nullptr;
  call_counts counts_;
};

class GpuCalls : public gpu_test {
 protected:
  static step_plan plan(const ones_on_device& tensor) {
    step_builder builder;
    builder.set_options({.max_grad_norm = 1.0,
                         .scaling = {.rule = loss_scale_rule::torch_amp},
                         .zero_gradients = true,
                         .record_capacity = 256});
    builder.add_tensor(builder.add_group({.learning_rate = 0.1}), tensor.operands("weight"));
    return builder.build();
  }

  /// The calls of 100 steps of an executor that has launched before; `step` makes one.
  template <class Step>
  static call_counts calls_of_steps(Step&& step, const graph_options& options = {}) {
    const ones_on_device tensor;
    const cuda_stream stream;
    graph_executor executor(plan(tensor), stream.get(), {}, options);
    executor.launch(stream.get());
    call_counts counts;
    {
      const call_counter counter;
      for (int i = 0; i < 100; ++i) step(executor, stream.get(), i);
      counts = counter.counts();
    }
    stream.synchronize();
    return counts;
  }
};

TEST_F(GpuCalls, SteadyStepIsOneLaunchAndTwoQuestionsToTheHost) {
  const call_counts counts = calls_of_steps([](graph_executor& executor, cudaStream_t stream, int) {
    executor.launch(stream);
    executor.read_records();
  });
  // Which device is current, and whether the stream is being captured: neither goes to the device.
  const call_counts expected = {
      {"cudaGetDevice", 100}, {"cudaGraphLaunch", 100}, {"cudaStreamIsCapturing", 100}};
  EXPECT_EQ(counts, expected);
}

TEST_F(GpuCalls, RecordedLaunchAddsOneEvent) {
  const call_counts counts = calls_of_steps(
      [](graph_executor& executor, cudaStream_t stream, int) { executor.launch(stream); },
      {.record_launches = true});
  const call_counts expected = {{"cudaEventRecord", 100},
                                {"cudaGetDevice", 100},
                                {"cudaGraphLaunch", 100},
                                {"cudaStreamIsCapturing", 100}};
  EXPECT_EQ(counts, expected);
}

TEST_F(GpuCalls, ValueSetByHandAddsOneCall) {
  const call_counts counts =
      calls_of_steps([](graph_executor& executor, cudaStream_t stream, int step) {
        executor.set_learning_rate(0, 1e-3 * step);
        executor.launch(stream);
      });
  EXPECT_THAT(counts, Contains(Pair("cudaGraphLaunch", 100)));
  EXPECT_THAT(counts, Contains(Pair("cudaGraphExecKernelNodeSetParams", 100)));
  for (const char* absent : {"cudaMemcpyAsync", "cudaEventRecord", "cudaStreamSynchronize",
                             "cudaDeviceSynchronize", "cudaGraphInstantiate"}) {
    EXPECT_THAT(counts, Not(Contains(Key(absent))));
  }
}

}  // namespace
}  // namespace stepgraph::test
