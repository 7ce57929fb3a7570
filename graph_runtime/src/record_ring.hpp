#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "stepgraph/kernels/record_ring.hpp"
#include "stepgraph/step_plan.hpp"
#include "stepgraph/step_record.hpp"

namespace stepgraph::detail {

/// The reading side of a ring of step records, and the owner of its memory.
class record_ring {
 public:
  /// Bytes of the ring of a plan.
  static std::size_t bytes_for(const step_plan& plan);

  /// `memory` holds bytes_for(plan) bytes, aligned to 16.
  record_ring(const step_plan& plan, std::shared_ptr<void> memory);

  /// For the step that writes it.
  record_ring_view view() const noexcept;

  /// Takes the records that are complete.
  record_batch read();

 private:
  /// Copies record number `next_` if its slot holds it, undisturbed.
  bool copy_next(step_record& record) const;

  std::shared_ptr<void> memory_;
  record_slot* slots_;
  record_group* groups_;
  std::uint32_t capacity_;
  std::uint32_t group_count_;
  std::uint64_t next_ = 1;
};

}  // namespace stepgraph::detail
