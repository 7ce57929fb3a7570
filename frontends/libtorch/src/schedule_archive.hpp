#pragma once

#include <torch/serialize/archive.h>

#include <optional>
#include <string>

#include "stepgraph/schedule.hpp"

namespace stepgraph::libtorch::detail {

/// Writes a schedule, every field of it, or that there is none.
void write_schedule(torch::serialize::OutputArchive& archive, const std::string& key,
                    const std::optional<schedule>& written);

/// Restores what `write_schedule` wrote; leaves `read` as it is if the archive says nothing under
/// `key`. Throws usage_error, naming the key, for a schedule that cannot be evaluated.
void read_schedule(torch::serialize::InputArchive& archive, const std::string& key,
                   std::optional<schedule>& read);

}  // namespace stepgraph::libtorch::detail
