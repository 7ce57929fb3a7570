#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nvtx3/nvToolsExt.h>

#include <deque>
#include <set>
#include <utility>

#include "common/ones_on_device.hpp"
#include "stepgraph/cuda/capture_scope.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"

namespace stepgraph::test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// What was heard: the names of ranges as they begin, indented by the ranges around them.
struct listener {
  std::deque<std::string> domains;  ///< a handle is an address in here
  std::set<std::string> used_domains;
  std::vector<std::string> ranges;
  int depth = 0;
};
listener heard;

nvtxDomainHandle_t create_domain(const char* name) {
  heard.domains.emplace_back(name);
  return reinterpret_cast<nvtxDomainHandle_t>(&heard.domains.back());
}

int push_range(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  heard.used_domains.insert(*reinterpret_cast<const std::string*>(domain));
  heard.ranges.push_back(std::string(static_cast<std::size_t>(heard.depth), ' ') +
                         attributes->message.ascii);
  return heard.depth++;
}

int pop_range(nvtxDomainHandle_t) { return --heard.depth; }

int listen(NvtxGetExportTableFunc_t tables) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(tables(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int count = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &functions, &count) == 0) return 0;
  *functions[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(&create_domain);
  *functions[NVTX_CBID_CORE2_DomainRangePushEx] =
      reinterpret_cast<NvtxFunctionPointer>(&push_range);
  *functions[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop_range);
  return 1;
}

/// Listens unless a profiler does: nvtx looks here at its first call.
const bool listening = [] {
  InitializeInjectionNvtx2_fnptr = &listen;
  return true;
}();

constexpr const char* f32_update = "update/f32/f32/none/f32/f32";

class GpuTrace : public gpu_test {
 protected:
  void SetUp() override {
    gpu_test::SetUp();
    heard.ranges.clear();
  }
  static step_plan plan(const ones_on_device& tensor) {
    step_builder builder;
    builder.set_options({.skip_non_finite = true});
    builder.add_tensor(builder.add_group({.learning_rate = 0.1}), tensor.operands("weight"));
    builder.add_foreign_work({.name = "exchange", .node = "grad_stats"});
    return builder.build();
  }
  static foreign_work nothing() {
    return {{"exchange", [](cudaStream_t) {}}};
  }
  static std::vector<std::string> take() { return std::exchange(heard.ranges, {}); }
};

TEST_F(GpuTrace, StreamExecutorNamesTheStepAndEveryNode) {
  const ones_on_device tensor;
  const cuda_stream stream;
  stream_executor executor(plan(tensor), stream.get(), nothing());
  EXPECT_THAT(take(), IsEmpty());
  const auto whole_step =
      ElementsAre("stepgraph step", " grad_stats", " exchange", std::string(" ") + f32_update);
  executor.launch(stream.get());
  EXPECT_THAT(take(), whole_step);
  {
    cuda::capture_scope capture(stream.get());
    executor.launch(stream.get());
  }
  EXPECT_THAT(take(), whole_step);
  EXPECT_EQ(heard.depth, 0);
  EXPECT_THAT(heard.used_domains, ElementsAre("stepgraph"));
}

TEST_F(GpuTrace, GraphExecutorNamesTheCaptureAndEveryLaunch) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(plan(tensor), stream.get(), nothing());
  EXPECT_THAT(take(), ElementsAre("stepgraph capture", " grad_stats", " exchange",
                                  std::string(" ") + f32_update));
  executor.launch(stream.get());
  executor.launch(stream.get());
  EXPECT_THAT(take(), ElementsAre("stepgraph step", "stepgraph step"));
}

TEST_F(GpuTrace, RangesEndWhenWorkThrows) {
  const ones_on_device tensor;
  const cuda_stream stream;
  EXPECT_THROW(graph_executor(plan(tensor), stream.get(),
                              {{"exchange", [](cudaStream_t) { throw std::runtime_error("no"); }}}),
               std::runtime_error);
  EXPECT_EQ(heard.depth, 0);
}

}  // namespace
}  // namespace stepgraph::test
