#pragma once

#include <string>

#include "training.hpp"

namespace stepgraph::cli {

/// The result of a training as a JSON document and as text for people.
std::string json_of(const training_settings& settings, const training_result& result);
std::string text_of(const training_settings& settings, const training_result& result);

}  // namespace stepgraph::cli
