#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "common/executor_adapter.hpp"
#include "common/test_problem.hpp"

/// The suite that every executor must pass. Instantiations are called Host, GpuStreamEager,
/// GpuStreamCaptured and GpuGraph; those that need a GPU skip where there is none.
namespace stepgraph::test {

/// Tests that run on one executor.
class Conformance : public ::testing::TestWithParam<executor_kind> {
 protected:
  void SetUp() override {
    const std::string missing = missing_for(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
  std::unique_ptr<executor_adapter> make(const test_problem& problem) const {
    return make_adapter(GetParam(), problem);
  }
};

/// Tests that run on one executor with one more parameter, which has a test_name().
template <class Parameter>
class ConformanceWith : public ::testing::TestWithParam<std::tuple<executor_kind, Parameter>> {
 protected:
  void SetUp() override {
    const std::string missing = missing_for(kind());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
  executor_kind kind() const { return std::get<0>(this->GetParam()); }
  const Parameter& tested() const { return std::get<1>(this->GetParam()); }
  std::unique_ptr<executor_adapter> make(const test_problem& problem) const {
    return make_adapter(kind(), problem);
  }
};

/// Runs the problem on an executor and on the host executor, which is the oracle: same numbers,
/// same order, same bits.
inline void expect_bits_of_host(executor_kind kind, const test_problem& problem, int steps) {
  const auto found = make_adapter(kind, problem);
  const auto expected = make_adapter(executor_kind::host, problem);
  found->run_with_fresh_gradients(steps);
  expected->run_with_fresh_gradients(steps);
  expect_same_bits(problem, found->read_all(), expected->read_all());
  expect_same_status(found->get().status(), expected->get().status());
  // The status was waited for, so all records are there.
  expect_same_records(found->get().read_records(), expected->get().read_records());
  found->expect_guards_intact();
}

struct test_names {
  std::string operator()(const ::testing::TestParamInfo<executor_kind>& tested) const {
    return name_of(tested.param);
  }
  template <class Parameter>
  std::string operator()(
      const ::testing::TestParamInfo<std::tuple<executor_kind, Parameter>>& tested) const {
    return test_name(std::get<1>(tested.param));
  }
};

#if defined(STEPGRAPH_HAS_CUDA)
#define STEPGRAPH_INSTANTIATE_FOR_GPU(suite, parameters)                                         \
  INSTANTIATE_TEST_SUITE_P(GpuStreamEager, suite,                                                \
                           parameters(::stepgraph::test::executor_kind::stream_eager),           \
                           ::stepgraph::test::test_names());                                     \
  INSTANTIATE_TEST_SUITE_P(GpuStreamCaptured, suite,                                             \
                           parameters(::stepgraph::test::executor_kind::stream_captured),        \
                           ::stepgraph::test::test_names());                                     \
  INSTANTIATE_TEST_SUITE_P(GpuGraph, suite, parameters(::stepgraph::test::executor_kind::graph), \
                           ::stepgraph::test::test_names())
#else
#define STEPGRAPH_INSTANTIATE_FOR_GPU(suite, parameters) \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(suite)
#endif

/// `parameters(kind)` gives the parameters of the suite for one executor.
#define STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(suite, parameters)                         \
  INSTANTIATE_TEST_SUITE_P(Host, suite, parameters(::stepgraph::test::executor_kind::host), \
                           ::stepgraph::test::test_names());                                \
  STEPGRAPH_INSTANTIATE_FOR_GPU(suite, parameters)

/// The parameters of a Conformance suite.
inline auto one_executor(executor_kind kind) { return ::testing::Values(kind); }

/// The parameters of a ConformanceWith<update_signature> suite.
inline auto every_tuned_signature(executor_kind kind) {
  return ::testing::Combine(::testing::Values(kind), ::testing::ValuesIn(tuned_signatures()));
}

}  // namespace stepgraph::test
