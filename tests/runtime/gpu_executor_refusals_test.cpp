#include <gtest/gtest.h>

#include "common/expect_error.hpp"
#include "common/ones_on_device.hpp"
#include "runtime/host_tensor.hpp"
#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/cuda/stream_executor.hpp"
#include "stepgraph/error.hpp"

namespace stepgraph::test {
namespace {

class GpuRefusals : public gpu_test {
 protected:
  /// Both CUDA executors refuse the plan with these words, and the stream goes on.
  static void expect_refusal(const step_plan& plan, const std::vector<std::string>& words) {
    const cuda_stream stream;
    expect_error<usage_error>([&] { stream_executor(plan, stream.get()); }, words);
    expect_error<usage_error>([&] { graph_executor(plan, stream.get()); }, words);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    const ones_on_device tensor;
    graph_executor executor(tensor.plan(), stream.get());
    executor.launch(stream.get());
    stream.synchronize();
    EXPECT_NEAR(tensor.first_parameter(), 0.9, 1e-6);
  }
};

TEST_F(GpuRefusals, PlanOfShapesAlone) {
  step_builder builder(plan_purpose::inspect);
  builder.add_group({});
  expect_refusal(builder.build(), {"inspect", "memory"});
}

TEST_F(GpuRefusals, PlanOfHostTensors) {
  host_tensor memory;
  step_builder builder;
  builder.add_tensor(builder.add_group({}), memory.operands("weight"));
  expect_refusal(builder.build(), {"host", "CUDA"});
}

TEST_F(GpuRefusals, HostMemoryThatIsCalledDeviceMemory) {
  const ones_on_device tensor(8);
  host_tensor memory(8);
  tensor_operands operands = tensor.operands("weight");
  operands.exp_avg.data = memory.exp_avg.data();
  step_builder builder;
  builder.add_tensor(builder.add_group({}), operands);
  expect_refusal(builder.build(), {"weight", "exp_avg", "host", "cuda:0"});
}

TEST_F(GpuRefusals, DeviceThatDoesNotExist) {
  const ones_on_device tensor;
  tensor_operands operands = tensor.operands("weight");
  for (tensor_view* view :
       {&operands.parameter, &*operands.gradient, &operands.exp_avg, &operands.exp_avg_sq}) {
    view->device.index = 1000;
  }
  step_builder builder;
  builder.add_tensor(builder.add_group({}), operands);
  expect_refusal(builder.build(), {"cuda:1000"});
}

TEST_F(GpuRefusals, InputsThatTheDeviceCannotRead) {
  int reads_all_memory = 0;
  check(cudaDeviceGetAttribute(&reads_all_memory, cudaDevAttrPageableMemoryAccess, 0));
  if (reads_all_memory != 0) GTEST_SKIP() << "this device reads any memory of the host";
  const ones_on_device tensor;
  const float input = 1.0f;
  expect_refusal(tensor.plan({}, {.found_inf_input = &input}), {"found_inf_input", "cuda:0"});
  expect_refusal(tensor.plan({}, {.loss_scale_input = &input}), {"loss_scale_input", "cuda:0"});
  expect_refusal(tensor.plan({.name = "bent", .learning_rate_input = &input}),
                 {"bent", "learning_rate_input", "cuda:0"});
  expect_refusal(tensor.plan({.name = "bent", .weight_decay_input = &input}),
                 {"bent", "weight_decay_input", "cuda:0"});
}

TEST_F(GpuRefusals, RebindToHostMemoryChangesNothing) {
  const ones_on_device tensor;
  host_tensor memory;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  for (const operand_kind operand : {operand_kind::parameter, operand_kind::gradient,
                                     operand_kind::exp_avg, operand_kind::exp_avg_sq}) {
    expect_error<usage_error>([&] { executor.rebind(0, operand, memory.parameter.data()); },
                              {"weight", name_of(operand), "host", "cuda:0"});
  }
  expect_error<usage_error>([&] { executor.rebind(0, operand_kind::parameter, nullptr); },
                            {"weight", "parameter", "null"});
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.9, 1e-6);
}

TEST_F(GpuRefusals, RefusedSettersLeaveTheExecutorAsItWas) {
  const ones_on_device tensor;
  const cuda_stream stream;
  graph_executor executor(tensor.plan(), stream.get());
  expect_error<usage_error>([&] { executor.set_learning_rate(0, -1.0); }, {"learning_rate"});
  expect_error<usage_error>([&] { executor.set_betas(0, 0.5, 1.0); }, {"beta2"});
  expect_error<usage_error>([&] { executor.set_eps(1, 0.5); }, {"group 1"});
  executor.launch(stream.get());
  stream.synchronize();
  EXPECT_NEAR(tensor.first_parameter(), 0.9, 1e-6);
}

}  // namespace
}  // namespace stepgraph::test
