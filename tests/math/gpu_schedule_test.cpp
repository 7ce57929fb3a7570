#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "common/cuda_testing.hpp"
#include "math/device_schedule.hpp"

// The device's values of a schedule against the host's, bit for bit.
namespace stepgraph {
namespace {

using test::check;
using test::device_buffer;

struct device_case {
  const char* name;
  schedule_segment segment;  ///< `from`, `to` and `origin` are the same in all
};

const device_case device_cases[] = {
    {"constant", {.curve = schedule_curve::constant}},
    {"linear", {.curve = schedule_curve::linear, .length = 77'777.0}},
    {"rise_cosine", {.curve = schedule_curve::rise_cosine, .length = 77'777.0}},
    {"anneal_linear", {.curve = schedule_curve::anneal_linear, .length = 77'777.0}},
    {"anneal_cosine", {.curve = schedule_curve::anneal_cosine, .length = 77'777.0}},
    {"anneal_exponential", {.curve = schedule_curve::anneal_exponential, .length = 77'777.0}},
    {"anneal_minus_sqrt", {.curve = schedule_curve::anneal_minus_sqrt, .length = 77'777.0}},
    {"anneal_polynomial",
     {.curve = schedule_curve::anneal_polynomial, .length = 77'777.0, .ratio = 1.7}},
    {"cosine_wave", {.curve = schedule_curve::cosine_wave, .period = 911}},
    {"cosine_restarts", {.curve = schedule_curve::cosine_restarts, .period = 911}},
    {"cosine_restarts_growing",
     {.curve = schedule_curve::cosine_restarts, .period = 3, .ratio = 2.0}},
    {"inverse_square_root", {.curve = schedule_curve::inverse_square_root}},
    {"step_decay", {.curve = schedule_curve::step_decay, .period = 7, .ratio = 0.9993}},
    {"step_growth", {.curve = schedule_curve::step_decay, .period = 1, .ratio = 1.0001}},
    {"milestone_decay", {.curve = schedule_curve::milestone_decay, .table_count = 4, .ratio = 0.3}},
    {"table", {.curve = schedule_curve::table, .table_count = 4, .table_offset = 1}},
};

class GpuSchedule : public test::gpu_test, public ::testing::WithParamInterface<device_case> {};

TEST_P(GpuSchedule, HasTheBitsOfTheHost) {
  constexpr std::uint32_t count = 100'001;
  schedule_segment segment = GetParam().segment;
  segment.from = 3e-4;
  segment.to = 1.7e-5;
  segment.origin = -3.5;
  segment.multiplier = 0.7;
  const std::vector<double> table = {2.0, 5.0, 5.0, 40'000.0, 90'000.0};
  const device_buffer<schedule_segment> device_segment(std::vector<schedule_segment>{segment});
  const device_buffer<double> device_table(table);
  const device_buffer<double> values(count);
  for (const std::uint64_t stride : {std::uint64_t{1}, (std::uint64_t{1} << 53) / count}) {
    check(test::evaluate_on_device(device_segment.data(), device_table.data(), 0, stride,
                                   values.data(), count));
    const std::vector<double> found = values.read();
    for (std::uint32_t i = 0; i < count; ++i) {
      const double expected = math::value_at(&segment, 1, table.data(), i * stride);
      ASSERT_EQ(std::bit_cast<std::uint64_t>(found[i]), std::bit_cast<std::uint64_t>(expected))
          << "clock " << i * stride << ": " << std::hexfloat << found[i] << ", host " << expected;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(GpuCurves, GpuSchedule, ::testing::ValuesIn(device_cases),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace stepgraph
