#include "bench_report.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "text_table.hpp"

namespace stepgraph::cli {
namespace {

const char* step_of(const bench_case& measured) {
  return measured.whole_step ? "clip, AdamW, zero" : "AdamW";
}

}  // namespace

std::string text_of(const bench_result& result) {
  const bool on_gpu = result.executor == "graph";
  std::string text = fmt::format(
      "{} executor on {}; {}: {:.0f} GB/s read and written\n\n", result.executor, result.device,
      on_gpu ? "a copy on the device" : "memcpy by all threads", result.copy_gb_s);
  std::vector<std::vector<std::string>> rows = {
      {"tensors", "step", "storage", "us", "GB/s", "of the copy"}};
  if (on_gpu) rows.front().emplace_back("CPU us a replay");
  for (const bench_row& row : result.rows) {
    rows.push_back({row.measured.list, step_of(row.measured), name_of(row.measured.signature),
                    fmt::format("{:.1f}", row.times.step_us), fmt::format("{:.0f}", row.gb_s()),
                    fmt::format("{:.3f}", row.gb_s() / result.copy_gb_s)});
    if (on_gpu) rows.back().push_back(fmt::format("{:.2f}", row.times.launch_us.value_or(0.0)));
  }
  text += aligned(rows, 3);
  if (!result.left_out.empty()) {
    text += fmt::format("\nLeft out for their memory: {} cases; --memory sets the limit.\n",
                        result.left_out.size());
  }
  text +=
      "\nStorage: parameter/gradient/master/exp_avg/exp_avg_sq. Medians of steps back to back; "
      "short lists may fit a cache and exceed the copy.\n";
  return text;
}

std::string json_of(const bench_result& result) {
  using json = nlohmann::ordered_json;
  json cases = json::array();
  for (const bench_row& row : result.rows) {
    cases.push_back(
        {{"tensors", row.measured.list},
         {"tensor_count", row.measured.numels.size()},
         {"step", step_of(row.measured)},
         {"signature", name_of(row.measured.signature)},
         {"bytes", row.times.bytes},
         {"step_us", row.times.step_us},
         {"gb_s", row.gb_s()},
         {"share_of_copy", row.gb_s() / result.copy_gb_s},
         {"replay_cpu_us", row.times.launch_us ? json(*row.times.launch_us) : json(nullptr)}});
  }
  json left_out = json::array();
  for (const bench_case& measured : result.left_out) {
    left_out.push_back({{"tensors", measured.list},
                        {"step", step_of(measured)},
                        {"signature", name_of(measured.signature)},
                        {"memory_bytes", measured.memory_bytes()}});
  }
  const json document = {{"executor", result.executor},
                         {"device", result.device},
                         {"copy_gb_s", result.copy_gb_s},
                         {"cases", std::move(cases)},
                         {"left_out", std::move(left_out)}};
  return document.dump(2) + "\n";
}

}  // namespace stepgraph::cli
