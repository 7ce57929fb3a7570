#pragma once

#include <string>
#include <vector>

#include "stepgraph/schedule.hpp"

namespace stepgraph::cli {

/// "linear", "anneal_cosine", ...: the enumerator.
const char* name_of(schedule_curve curve);

/// A line a segment, with every number that its curve uses in full precision: equal schedules have
/// equal lines, and different ones different lines (a table is named by a digest of its entries).
std::vector<std::string> describe(const schedule& described);

}  // namespace stepgraph::cli
