#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "stepgraph/kernels/record_ring.hpp"
#include "stepgraph/step_plan.hpp"
#include "stepgraph/step_record.hpp"

namespace stepgraph::detail {

/// The reading side of a ring of step records, and the owner of its memory.
class record_ring {
 public:
  /// Bytes of the ring of a plan.
  static std::size_t bytes_for(const step_plan& plan);

  /// `memory` holds bytes_for(plan) bytes, aligned to 8. `launches` have been made before the
  /// first one that writes into it.
  record_ring(const step_plan& plan, std::shared_ptr<void> memory, std::uint64_t launches = 0);

  /// For the step that writes it.
  record_ring_view view() const noexcept { return ring_; }

  /// Takes the records that are complete.
  record_batch read();

  /// The records that it holds.
  std::uint32_t capacity() const noexcept { return ring_.capacity; }

 private:
  /// Copies what lies in the place of record number `next_`. Returns that number if the record is
  /// there, whole; the number of a later one if that has overwritten it or is about to; else 0.
  std::uint64_t copy_next();
  /// The record that was copied.
  step_record copied() const;

  std::shared_ptr<void> memory_;
  record_ring_view ring_;
  std::uint32_t group_count_;
  std::uint64_t next_;
  std::vector<std::uint32_t> values_;
};

/// The ring of an executor, through updates that replace it. Safe from any thread.
class record_reader {
 public:
  /// What is complete and was not taken yet, of earlier rings too.
  record_batch read();
  /// Keeps what the ring holds, for a later `read`; no more than a ring full of records.
  void drain();
  /// The step writes into another ring from now on; null: none. What the old one held is lost
  /// unless it was drained. Returns the old one.
  std::unique_ptr<record_ring> replace(std::unique_ptr<record_ring> ring) noexcept;

 private:
  void collect();

  std::mutex mutex_;
  std::unique_ptr<record_ring> ring_;
  record_batch kept_;
};

}  // namespace stepgraph::detail
