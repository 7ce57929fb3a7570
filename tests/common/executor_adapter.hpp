#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/test_problem.hpp"
#include "stepgraph/executor.hpp"

/// One face for every way to run a step, so that one suite judges them all.
namespace stepgraph::test {

enum class executor_kind {
  host,             ///< host_executor
  stream_eager,     ///< stream_executor, kernels enqueued each step
  stream_captured,  ///< stream_executor, captured once into a graph of the caller's and replayed
  graph,            ///< graph_executor
};

std::string name_of(executor_kind kind);

/// Why this kind cannot run here; empty if it can.
std::string missing_for(executor_kind kind);

/// A problem in the memory of an executor. Every operand lies between guards that no step may
/// touch and whose bytes are NaN in every format.
class executor_adapter {
 public:
  virtual ~executor_adapter();
  executor_adapter(const executor_adapter&) = delete;
  executor_adapter& operator=(const executor_adapter&) = delete;

  const test_problem& problem() const { return problem_; }
  virtual executor& get() = 0;

  /// Enqueues one step, after everything enqueued before; does not wait.
  virtual void launch() = 0;
  void launch(int steps);

  /// Runs `steps` steps with a fresh gradient each.
  void run_with_fresh_gradients(int steps, int first = 0);

  /// Both are ordered after the launches made so far and wait for them.
  void write(std::size_t tensor, std::size_t operand, std::span<const std::byte> bytes);
  void write_gradient(std::size_t tensor, std::span<const float> values);
  void write_input(std::size_t input, float value);
  operand_bytes read(std::size_t tensor, std::size_t operand) const;
  std::vector<operand_set> read_all() const;
  /// The elements as f32, scales applied.
  std::vector<float> values(std::size_t tensor, std::size_t operand) const;
  /// The only element of a problem of one element, or the first.
  double first_value(std::size_t operand = parameter_operand) const;

  /// Points a bindable operand at new memory with these contents, `offset` elements off a boundary;
  /// the old memory keeps what it holds. Does not wait for launches.
  void rebind(std::size_t tensor, std::size_t operand, std::span<const std::byte> contents,
              std::uint64_t offset = 0);

  /// Brings the executor to another problem. Tensors of the same name, size and signature keep
  /// their memory, others get memory of their own with the contents of `next`. If it throws, the
  /// adapter stays at the problem before.
  update_report update(const test_problem& next);

  /// Expects that no byte beside an operand changed.
  void expect_guards_intact() const;

 protected:
  explicit executor_adapter(const test_problem& problem);

  /// Memory where the executor works.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  /// Copies in the order of launches; `wait` waits for them first.
  virtual void copy_in(std::byte* target, std::span<const std::byte> bytes, bool wait) = 0;
  virtual void copy_out(std::span<std::byte> target, const std::byte* source) const = 0;
  virtual update_report update_executor(step_plan plan) = 0;

  /// To be called by the constructor of the derived class, which can allocate then.
  step_plan place(device_location device);

 private:
  struct block {
    std::byte* memory = nullptr;
    std::vector<std::byte> guarded;  ///< the block's bytes with guards, as allocated
    struct range {
      std::size_t begin = 0;
      std::size_t size = 0;
    };
    std::vector<range> operands;
  };

  /// Where an operand is.
  struct location {
    std::size_t block = 0;
    std::size_t begin = 0;
  };
  std::byte* address_of(std::size_t tensor, std::size_t operand) const;
  using operand_locations = std::array<location, operand_count>;
  step_plan plan_of(const test_problem& problem,
                    const std::vector<operand_locations>& locations) const;
  /// Appends the operands of one tensor to a block that will be number `index`.
  static operand_locations append(block& grown, std::size_t index, const problem_tensor& tensor,
                                  const operand_set& contents);

  test_problem problem_;
  device_location device_;
  std::vector<block> blocks_;
  std::vector<operand_locations> locations_;
  std::vector<std::size_t> inputs_;  ///< where each input is in the first block
};

/// A problem placed and its executor built; throws what the executor throws.
std::unique_ptr<executor_adapter> make_adapter(executor_kind kind, const test_problem& problem);

/// Expects two runs to stand at the same place, bit for bit.
void expect_same_status(const step_status& found, const step_status& expected);

/// Expects two runs to have written the same records.
void expect_same_records(const record_batch& found, const record_batch& expected);

/// Expects two runs to hold the same bytes, naming the first tensor, operand and element that
/// differ.
void expect_same_bits(const test_problem& problem, const std::vector<operand_set>& found,
                      const std::vector<operand_set>& expected);

}  // namespace stepgraph::test
