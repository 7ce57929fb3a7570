#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "char_transformer.hpp"
#include "stepgraph/libtorch/adam.hpp"
#include "text_data.hpp"
#include "training.hpp"

namespace stepgraph::cli {

/// What decides on the numbers of a training, as pairs of an option and its value: all but the
/// number of steps, the device and the files.
using run_description = std::vector<std::pair<std::string, std::string>>;

run_description describe_run(const training_settings& settings, const text_data& text);

/// What a checkpoint holds. Borrowed.
struct training_state {
  char_transformer& model;
  libtorch::Adam& optimizer;
  batch_sampler& sampler;
};

/// Writes a checkpoint after `steps_done` steps. An earlier file of that name is replaced when the
/// new one is complete, never before. Throws stepgraph::error.
void save_checkpoint(const std::string& path, const training_state& state, std::int64_t steps_done,
                     const run_description& description);

/// Restores what `save_checkpoint` wrote, on whatever device it was written, and returns the steps
/// done. Throws stepgraph::error for a file that is not a checkpoint and, naming the option, for
/// one of another training.
std::int64_t load_checkpoint(const std::string& path, const training_state& state,
                             const run_description& description);

}  // namespace stepgraph::cli
