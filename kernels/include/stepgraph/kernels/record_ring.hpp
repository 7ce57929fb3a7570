#pragma once

#include <cstddef>
#include <cstdint>

#include "stepgraph/kernels/tagged_word.hpp"
#include "stepgraph/math/step_scalars.hpp"

/// The ring into which a step writes its records, in memory that the host reads without waiting
/// (page-locked memory for a step on a device).
namespace stepgraph {

/// A ring of `capacity` records. A record is the step's scalars after the launch, then the progress
/// of each group, as tagged words of 4 bytes each. Null: no records are written.
struct record_ring_view {
  std::uint64_t* words = nullptr;
  std::uint32_t capacity = 0;
};

inline constexpr std::uint32_t scalar_words = sizeof(step_scalars) / sizeof(std::uint32_t);
inline constexpr std::uint32_t progress_words = sizeof(group_progress) / sizeof(std::uint32_t);
static_assert(scalar_words * sizeof(std::uint32_t) == sizeof(step_scalars));
static_assert(progress_words * sizeof(std::uint32_t) == sizeof(group_progress));

/// The word with the upper half of `launches`: its tag is the lower half, so it alone says of which
/// launch it is.
inline constexpr std::uint32_t launch_word =
    offsetof(step_scalars, launches) / sizeof(std::uint32_t) + 1;

STEPGRAPH_HOST_DEVICE constexpr std::uint32_t words_of_record(std::uint32_t groups) {
  return scalar_words + groups * progress_words;
}

/// Where the record of launch number `launch` begins; the first launch has number 1.
STEPGRAPH_HOST_DEVICE std::uint64_t* record_of(const record_ring_view& ring, std::uint32_t groups,
                                               std::uint64_t launch) {
  return ring.words + (launch - 1) % ring.capacity * words_of_record(groups);
}

}  // namespace stepgraph
