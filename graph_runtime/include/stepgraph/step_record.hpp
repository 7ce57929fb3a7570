#pragma once

#include <cstdint>
#include <vector>

namespace stepgraph {

/// What one group says in a record.
struct group_record {
  std::uint64_t step = 0;      ///< updates applied so far
  double learning_rate = 0.0;  ///< of the latest applied update
  double weight_decay = 0.0;   ///< of the latest applied update
};

/// What a step says about itself, applied or skipped.
struct step_record {
  std::uint64_t launch = 0;   ///< launches of the executor so far, this one included
  std::uint64_t step = 0;     ///< steps applied so far
  std::uint64_t skipped = 0;  ///< steps skipped so far
  std::uint64_t samples = 0;  ///< consumed by the applied steps so far
  bool was_skipped = false;   ///< this step was
  bool found_inf = false;     ///< a gradient was not finite, or the input said so
  double grad_norm = 0.0;  ///< global norm of the unscaled gradient before clipping; 0 if the plan
                           ///< does not measure it, infinity if it is not finite
  double clip_coefficient = 1.0;
  double loss_scale = 1.0;
  std::uint64_t zeros = 0;  ///< gradient elements that are zero, if the plan counts them
  std::vector<group_record> groups;
};

/// Records in the order of their launches.
struct record_batch {
  std::vector<step_record> records;
  std::uint64_t overwritten = 0;  ///< records lost since the last batch: the ring was full
};

}  // namespace stepgraph
