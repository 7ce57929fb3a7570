#include "common/executor_adapter.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "common/cuda_executor_adapter.hpp"
#include "stepgraph/host_executor.hpp"

namespace stepgraph::test {
namespace {

constexpr std::size_t alignment = 256;
constexpr std::byte guard_byte{0xff};

/// Grows `bytes` by guards and one operand; returns where the operand starts.
std::size_t append_guarded(std::vector<std::byte>& bytes, std::span<const std::byte> operand,
                           std::size_t offset) {
  const std::size_t begin = (bytes.size() + 2 * alignment - 1) / alignment * alignment + offset;
  bytes.resize(begin, guard_byte);
  bytes.insert(bytes.end(), operand.begin(), operand.end());
  bytes.resize(bytes.size() + alignment, guard_byte);
  return begin;
}

class host_adapter final : public executor_adapter {
 public:
  explicit host_adapter(const test_problem& problem)
      : executor_adapter(problem), executor_(place({device_kind::host, 0})) {}

  executor& get() override { return executor_; }
  void launch() override { executor_.launch(); }

 protected:
  update_report update_executor(step_plan plan) override {
    return executor_.update(std::move(plan));
  }
  std::byte* allocate(std::size_t bytes) override {
    struct aligned_delete {
      void operator()(std::byte* memory) const {
        ::operator delete[](memory, std::align_val_t{alignment});
      }
    };
    auto* const memory =
        static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{alignment}));
    memory_.push_back(std::shared_ptr<std::byte>(memory, aligned_delete{}));
    return memory;
  }
  void copy_in(std::byte* target, std::span<const std::byte> bytes, bool) override {
    if (!bytes.empty()) std::memcpy(target, bytes.data(), bytes.size());
  }
  void copy_out(std::span<std::byte> target, const std::byte* source) const override {
    if (!target.empty()) std::memcpy(target.data(), source, target.size());
  }

 private:
  std::vector<std::shared_ptr<std::byte>> memory_;
  host_executor executor_;
};

}  // namespace

std::string name_of(executor_kind kind) {
  switch (kind) {
    case executor_kind::host:
      return "host";
    case executor_kind::stream_eager:
      return "stream_eager";
    case executor_kind::stream_captured:
      return "stream_captured";
    case executor_kind::graph:
      return "graph";
  }
  return "unknown";
}

std::string missing_for(executor_kind kind) {
  return kind == executor_kind::host ? std::string() : missing_gpu();
}

executor_adapter::executor_adapter(const test_problem& problem) : problem_(problem) {}
executor_adapter::~executor_adapter() = default;

std::byte* executor_adapter::address_of(std::size_t tensor, std::size_t operand) const {
  const location& at = locations_[tensor][operand];
  return blocks_[at.block].memory + at.begin;
}

executor_adapter::operand_locations executor_adapter::append(block& grown, std::size_t index,
                                                             const problem_tensor& tensor,
                                                             const operand_set& contents) {
  operand_locations locations;
  for (std::size_t operand = 0; operand < operand_count; ++operand) {
    const operand_bytes& bytes = contents[operand];
    const std::size_t offset = tensor.offsets[operand] * stored_size(tensor.signature, operand);
    locations[operand] = {index, append_guarded(grown.guarded, bytes, offset)};
    grown.operands.push_back({locations[operand].begin, bytes.size()});
  }
  return locations;
}

step_plan executor_adapter::place(device_location device) {
  device_ = device;
  block whole;
  for (std::size_t t = 0; t < problem_.tensors.size(); ++t) {
    locations_.push_back(append(whole, 0, problem_.tensors[t], problem_.contents[t]));
  }
  for (const step_input& input : problem_.inputs) {
    const auto bytes = std::as_bytes(std::span(&input.value, 1));
    inputs_.push_back(append_guarded(whole.guarded, bytes, 0));
    whole.operands.push_back({inputs_.back(), bytes.size()});
  }
  whole.memory = allocate(std::max(whole.guarded.size(), alignment));
  copy_in(whole.memory, whole.guarded, true);
  blocks_.push_back(std::move(whole));
  return plan_of(problem_, locations_);
}

step_plan executor_adapter::plan_of(const test_problem& problem,
                                    const std::vector<operand_locations>& locations) const {
  return problem.plan(
      device_,
      [&](std::size_t tensor, std::size_t operand) -> void* {
        const location& at = locations[tensor][operand];
        return blocks_[at.block].memory + at.begin;
      },
      [this](std::size_t input) {
        return reinterpret_cast<const float*>(blocks_[0].memory + inputs_.at(input));
      });
}

update_report executor_adapter::update(const test_problem& next) {
  std::vector<operand_locations> locations;
  block added;
  for (std::size_t t = 0; t < next.tensors.size(); ++t) {
    const problem_tensor& tensor = next.tensors[t];
    const auto known = std::find_if(
        problem_.tensors.begin(), problem_.tensors.end(), [&](const problem_tensor& candidate) {
          return candidate.name == tensor.name && candidate.numel == tensor.numel &&
                 candidate.signature == tensor.signature;
        });
    locations.push_back(
        known == problem_.tensors.end()
            ? append(added, blocks_.size(), tensor, next.contents[t])
            : locations_[static_cast<std::size_t>(known - problem_.tensors.begin())]);
  }
  added.memory = allocate(std::max(added.guarded.size(), alignment));
  copy_in(added.memory, added.guarded, false);
  blocks_.push_back(std::move(added));
  update_report report = update_executor(plan_of(next, locations));
  locations_ = std::move(locations);
  problem_ = next;
  return report;
}

void executor_adapter::launch(int steps) {
  for (int step = 0; step < steps; ++step) launch();
}

void executor_adapter::run_with_fresh_gradients(int steps, int first) {
  for (int step = first; step < first + steps; ++step) {
    for (std::size_t t = 0; t < problem_.tensors.size(); ++t) {
      write(t, gradient_operand, problem_.gradient_at(t, step));
    }
    launch();
  }
}

void executor_adapter::write(std::size_t tensor, std::size_t operand,
                             std::span<const std::byte> bytes) {
  copy_in(address_of(tensor, operand), bytes, true);
}

void executor_adapter::write_gradient(std::size_t tensor, std::span<const float> values) {
  write(tensor, gradient_operand, encode(problem_.tensors[tensor].signature.gradient, values));
}

void executor_adapter::write_input(std::size_t input, float value) {
  copy_in(blocks_[0].memory + inputs_[input], std::as_bytes(std::span(&value, 1)), true);
}

operand_bytes executor_adapter::read(std::size_t tensor, std::size_t operand) const {
  operand_bytes bytes(problem_.contents[tensor][operand].size());
  copy_out(bytes, address_of(tensor, operand));
  return bytes;
}

std::vector<operand_set> executor_adapter::read_all() const {
  // A block at a time: problems may have thousands of operands.
  std::vector<operand_bytes> contents;
  for (const block& allocated : blocks_) {
    copy_out(contents.emplace_back(allocated.guarded.size()), allocated.memory);
  }
  std::vector<operand_set> all(problem_.tensors.size());
  for (std::size_t t = 0; t < all.size(); ++t) {
    for (std::size_t operand = 0; operand < operand_count; ++operand) {
      const location& at = locations_[t][operand];
      const auto first = contents[at.block].begin() + static_cast<std::ptrdiff_t>(at.begin);
      const auto size = static_cast<std::ptrdiff_t>(problem_.contents[t][operand].size());
      all[t][operand].assign(first, first + size);
    }
  }
  return all;
}

std::vector<float> executor_adapter::values(std::size_t tensor, std::size_t operand) const {
  operand_set operands;
  for (std::size_t i = 0; i < operand_count; ++i) operands[i] = read(tensor, i);
  return values_of(problem_.tensors[tensor].signature, operands, operand);
}

double executor_adapter::first_value(std::size_t operand) const {
  return static_cast<double>(values(0, operand).at(0));
}

void executor_adapter::rebind(std::size_t tensor, std::size_t operand,
                              std::span<const std::byte> contents, std::uint64_t offset) {
  block fresh;
  const std::size_t begin = append_guarded(
      fresh.guarded, contents, offset * stored_size(problem_.tensors[tensor].signature, operand));
  fresh.operands.push_back({begin, contents.size()});
  fresh.memory = allocate(fresh.guarded.size());
  copy_in(fresh.memory, fresh.guarded, false);
  locations_[tensor][operand] = {blocks_.size(), begin};
  blocks_.push_back(std::move(fresh));
  get().rebind(static_cast<tensor_id>(tensor), static_cast<operand_kind>(operand),
               address_of(tensor, operand));
}

void executor_adapter::expect_guards_intact() const {
  for (const block& allocated : blocks_) {
    std::vector<std::byte> found(allocated.guarded.size());
    copy_out(found, allocated.memory);
    // Operands may change; whatever else differs was written by mistake.
    for (const auto& [begin, size] : allocated.operands) {
      std::fill_n(found.begin() + static_cast<std::ptrdiff_t>(begin), size, guard_byte);
    }
    EXPECT_TRUE(std::all_of(found.begin(), found.end(), [](std::byte byte) {
      return byte == guard_byte;
    })) << "memory beside an operand was written";
  }
}

std::unique_ptr<executor_adapter> make_adapter(executor_kind kind, const test_problem& problem) {
  if (kind == executor_kind::host) return std::make_unique<host_adapter>(problem);
  return make_cuda_adapter(kind, problem);
}

void expect_same_status(const step_status& found, const step_status& expected) {
  EXPECT_EQ(found.step, expected.step);
  EXPECT_EQ(found.skipped, expected.skipped);
  EXPECT_EQ(found.samples, expected.samples);
  EXPECT_EQ(found.last_skipped, expected.last_skipped);
  EXPECT_EQ(found.found_inf, expected.found_inf);
  EXPECT_EQ(found.grad_norm, expected.grad_norm);
  EXPECT_EQ(found.norms, expected.norms);
  EXPECT_EQ(found.zeros, expected.zeros);
  EXPECT_EQ(found.clip_coefficient, expected.clip_coefficient);
  EXPECT_EQ(found.loss_scale, expected.loss_scale);
  EXPECT_EQ(found.next_loss_scale.scale, expected.next_loss_scale.scale);
  EXPECT_EQ(found.next_loss_scale.growth_tracker, expected.next_loss_scale.growth_tracker);
  EXPECT_EQ(found.next_loss_scale.hysteresis_left, expected.next_loss_scale.hysteresis_left);
  ASSERT_EQ(found.groups.size(), expected.groups.size());
  for (std::size_t group = 0; group < found.groups.size(); ++group) {
    EXPECT_EQ(found.groups[group].step, expected.groups[group].step);
    EXPECT_EQ(found.groups[group].learning_rate, expected.groups[group].learning_rate);
    EXPECT_EQ(found.groups[group].weight_decay, expected.groups[group].weight_decay);
  }
}

void expect_same_records(const record_batch& found, const record_batch& expected) {
  EXPECT_EQ(found.overwritten, expected.overwritten);
  ASSERT_EQ(found.records.size(), expected.records.size());
  for (std::size_t i = 0; i < found.records.size(); ++i) {
    const step_record& a = found.records[i];
    const step_record& b = expected.records[i];
    EXPECT_EQ(a.launch, b.launch);
    EXPECT_EQ(a.step, b.step);
    EXPECT_EQ(a.skipped, b.skipped);
    EXPECT_EQ(a.samples, b.samples);
    EXPECT_EQ(a.was_skipped, b.was_skipped);
    EXPECT_EQ(a.found_inf, b.found_inf);
    EXPECT_EQ(a.grad_norm, b.grad_norm);
    EXPECT_EQ(a.clip_coefficient, b.clip_coefficient);
    EXPECT_EQ(a.loss_scale, b.loss_scale);
    EXPECT_EQ(a.zeros, b.zeros);
    ASSERT_EQ(a.groups.size(), b.groups.size());
    for (std::size_t group = 0; group < a.groups.size(); ++group) {
      EXPECT_EQ(a.groups[group].step, b.groups[group].step);
      EXPECT_EQ(a.groups[group].learning_rate, b.groups[group].learning_rate);
      EXPECT_EQ(a.groups[group].weight_decay, b.groups[group].weight_decay);
    }
  }
}

void expect_same_bits(const test_problem& problem, const std::vector<operand_set>& found,
                      const std::vector<operand_set>& expected) {
  for (std::size_t t = 0; t < problem.tensors.size(); ++t) {
    for (std::size_t operand = 0; operand < operand_count; ++operand) {
      const operand_bytes& a = found[t][operand];
      const operand_bytes& b = expected[t][operand];
      ASSERT_EQ(a.size(), b.size());
      if (a == b) continue;
      const problem_tensor& tensor = problem.tensors[t];
      const std::size_t size = stored_size(tensor.signature, operand);
      const auto difference = std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin();
      const std::size_t element = static_cast<std::size_t>(difference) / size;
      const auto bits = [&](const operand_bytes& bytes) {
        std::uint32_t stored = 0;
        std::memcpy(&stored, bytes.data() + element * size, size);
        return stored;
      };
      ADD_FAILURE() << "tensor '" << tensor.name << "' (" << tensor.numel << " x "
                    << name_of(tensor.signature) << "): " << operand_names[operand]
                    << " differs first at element " << element << ": bits 0x" << std::hex << bits(a)
                    << ", expected 0x" << bits(b);
      return;
    }
  }
}

}  // namespace stepgraph::test
