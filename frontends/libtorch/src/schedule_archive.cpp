#include "schedule_archive.hpp"

#include <ATen/Functions.h>
#include <fmt/format.h>
#include <torch/types.h>

#include "stepgraph/error.hpp"

// A schedule is two tables of one row a segment, whole numbers and floating-point numbers, and its
// own table: tensors, which archives keep bit for bit.

namespace stepgraph::libtorch::detail {
namespace {

constexpr std::int64_t counts_of_a_segment = 5;
constexpr std::int64_t numbers_of_a_segment = 6;

void check_table(const std::string& key, const at::Tensor& table, at::ScalarType type,
                 std::int64_t rows, std::int64_t columns) {
  if (table.scalar_type() == type && table.sizes() == at::IntArrayRef({rows, columns})) return;
  throw usage_error(
      fmt::format("{}: the checkpoint has a table of sizes {} and type {}, expected "
                  "{} x {} of {}",
                  key, c10::str(table.sizes()), c10::toString(table.scalar_type()), rows, columns,
                  c10::toString(type)));
}

}  // namespace

void write_schedule(torch::serialize::OutputArchive& archive, const std::string& key,
                    const std::optional<schedule>& written) {
  archive.write("has_" + key, c10::IValue(written.has_value()));
  if (!written) return;
  const auto segments = static_cast<std::int64_t>(written->segments.size());
  at::Tensor counts = at::empty({segments, counts_of_a_segment}, at::kLong);
  at::Tensor numbers = at::empty({segments, numbers_of_a_segment}, at::kDouble);
  auto* count = counts.mutable_data_ptr<std::int64_t>();
  auto* number = numbers.mutable_data_ptr<double>();
  for (const schedule_segment& segment : written->segments) {
    for (const std::uint64_t value :
         {static_cast<std::uint64_t>(segment.curve), std::uint64_t{segment.table_count},
          segment.table_offset, segment.begin, segment.period}) {
      *count++ = static_cast<std::int64_t>(value);
    }
    for (const double value : {segment.multiplier, segment.from, segment.to, segment.origin,
                               segment.length, segment.ratio}) {
      *number++ = value;
    }
  }
  at::Tensor table = at::empty({static_cast<std::int64_t>(written->table.size())}, at::kDouble);
  std::copy(written->table.begin(), written->table.end(), table.mutable_data_ptr<double>());
  archive.write(key + "_clock", c10::IValue(static_cast<std::int64_t>(written->clock)));
  archive.write(key + "_counts", counts, /*is_buffer=*/true);
  archive.write(key + "_numbers", numbers, /*is_buffer=*/true);
  archive.write(key + "_table", table, /*is_buffer=*/true);
}

void read_schedule(torch::serialize::InputArchive& archive, const std::string& key,
                   std::optional<schedule>& read) {
  c10::IValue value;
  if (!archive.try_read("has_" + key, value)) return;
  if (!value.toBool()) {
    read.reset();
    return;
  }
  archive.read(key + "_clock", value);
  at::Tensor counts;
  at::Tensor numbers;
  at::Tensor table;
  archive.read(key + "_counts", counts, /*is_buffer=*/true);
  archive.read(key + "_numbers", numbers, /*is_buffer=*/true);
  archive.read(key + "_table", table, /*is_buffer=*/true);
  const std::int64_t segments = counts.dim() == 2 ? counts.size(0) : 0;
  check_table(key, counts, at::kLong, segments, counts_of_a_segment);
  check_table(key, numbers, at::kDouble, segments, numbers_of_a_segment);
  check_table(key, table.view({1, -1}), at::kDouble, 1, table.numel());

  schedule restored;
  restored.clock = static_cast<schedule_clock>(value.toInt());
  const auto* count = counts.const_data_ptr<std::int64_t>();
  const auto* number = numbers.const_data_ptr<double>();
  for (std::int64_t i = 0; i < segments; ++i) {
    schedule_segment segment;
    segment.curve = static_cast<schedule_curve>(count[0]);
    segment.table_count = static_cast<std::uint32_t>(count[1]);
    segment.table_offset = static_cast<std::uint64_t>(count[2]);
    segment.begin = static_cast<std::uint64_t>(count[3]);
    segment.period = static_cast<std::uint64_t>(count[4]);
    segment.multiplier = number[0];
    segment.from = number[1];
    segment.to = number[2];
    segment.origin = number[3];
    segment.length = number[4];
    segment.ratio = number[5];
    restored.segments.push_back(segment);
    count += counts_of_a_segment;
    number += numbers_of_a_segment;
  }
  restored.table.assign(table.const_data_ptr<double>(),
                        table.const_data_ptr<double>() + table.numel());
  try {
    validate(restored);
  } catch (const usage_error& error) {
    throw usage_error(fmt::format("{} of the checkpoint: {}", key, error.what()));
  }
  read = std::move(restored);
}

}  // namespace stepgraph::libtorch::detail
