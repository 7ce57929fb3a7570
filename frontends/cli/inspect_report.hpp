#pragma once

#include <string>

#include "inspect_plan.hpp"
#include "stepgraph/step_plan.hpp"

namespace stepgraph::cli {

/// The plan as text for people, as a JSON document, and for Graphviz.
std::string text_of(const step_plan& plan, const inspect_settings& settings);
std::string json_of(const step_plan& plan, const inspect_settings& settings);
std::string dot_of(const step_plan& plan);

}  // namespace stepgraph::cli
