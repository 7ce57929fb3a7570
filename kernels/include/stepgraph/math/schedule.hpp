#pragma once

#include "stepgraph/math/learning_rate_schedule.hpp"
