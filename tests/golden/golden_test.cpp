#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <limits>
#include <map>
#include <sstream>

#include "common/warmed_up.hpp"
#include "conformance/conformance.hpp"

// Digests of the state after a few steps, one a signature: all tuned ones and some more, written by
// the host executor, reproduced by every other. A change of one bit of one element shows, also on a
// machine without a GPU. STEPGRAPH_UPDATE_GOLDEN=1 makes the Host tests write the file instead of
// reading it.
namespace stepgraph::test {
namespace {

std::filesystem::path digest_file() {
  // From the repository root, where ctest starts tests; else where the sources were at build time.
  const std::filesystem::path here = "tests/golden/digests.txt";
  return std::filesystem::exists(here) ? here : std::filesystem::path(STEPGRAPH_DIGEST_FILE);
}

std::map<std::string, std::string> read_digests() {
  std::map<std::string, std::string> digests;
  std::ifstream file(digest_file());
  std::string signature;
  std::string digest;
  while (file >> signature >> digest) digests[signature] = digest;
  return digests;
}

void write_digest(const std::string& signature, const std::string& digest) {
  std::map<std::string, std::string> digests = read_digests();
  digests[signature] = digest;
  std::ofstream file(digest_file());
  for (const auto& [name, value] : digests) file << name << ' ' << value << '\n';
}

/// FNV-1a in 64 bits.
class digest {
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) {
      state_ = (state_ ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3u;
    }
  }
  std::string text() const {
    std::ostringstream text;
    text << std::hex << std::setfill('0') << std::setw(16) << state_;
    return text.str();
  }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325u;
};

/// A bit of everything: sizes, alignments, modes, schedules, scaling, clipping.
test_problem varied_problem(const update_signature& signature) {
  test_problem problem;
  problem.options = {.skip_non_finite = true, .max_grad_norm = 3.0, .loss_scale = 128.0};
  problem.groups = {
      {.name = "decoupled", .weight_decay = 0.1},
      {.name = "l2", .learning_rate = 1e-2, .weight_decay = 0.01, .mode = weight_decay_mode::l2},
      {.name = "scheduled",
       .beta1 = 0.85,
       .beta2 = 0.98,
       .learning_rate_schedule = warmed_up(learning_rate_style::cosine, 1e-5, 1e-2, 1e-4, 2, 4)},
      {.name = "linear",
       .maximize = true,
       .learning_rate_schedule = warmed_up(learning_rate_style::linear, 0.0, 1e-2, 0.0, 1, 6)},
      {.name = "uncorrected", .eps = 1e-6, .bias_correction = false}};
  for (const std::uint64_t numel : {1u, 7u, 2048u, 2049u, 5001u, 130u}) {
    const auto t = static_cast<group_id>(problem.tensors.size());
    problem.add({"tensor " + std::to_string(t),
                 t % 5,
                 numel,
                 signature,
                 {0, t % 2, 0, 0, t % 3, 0, t % 5}});
  }
  return problem;
}

/// The digest of parameters, masters, moments and their scales after five applied steps and a
/// skipped one, and of what the step reports.
std::string digest_of(executor_adapter& adapter, const update_signature& signature) {
  adapter.run_with_fresh_gradients(3);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  operand_bytes gradient = adapter.problem().gradient_at(1, 3);
  const operand_bytes bad = encode(signature.gradient, std::span(&nan, 1));
  std::memcpy(gradient.data(), bad.data(), bad.size());
  adapter.write(1, gradient_operand, gradient);
  adapter.launch();
  adapter.get().set_learning_rate(0, 5e-3);
  adapter.run_with_fresh_gradients(2, 4);

  digest result;
  for (const operand_set& operands : adapter.read_all()) {
    for (std::size_t operand = 0; operand < operand_count; ++operand) {
      if (operand != gradient_operand) result.add(operands[operand]);
    }
  }
  const step_status status = adapter.get().status();
  EXPECT_EQ(status.step, 5u);
  EXPECT_EQ(status.skipped, 1u);
  result.add(std::as_bytes(std::span(&status.grad_norm, 1)));
  result.add(std::as_bytes(std::span(&status.clip_coefficient, 1)));
  return result.text();
}

/// Every tuned signature and a spread of the others.
std::vector<update_signature> golden_signatures() {
  std::vector<update_signature> signatures = tuned_signatures();
  const std::vector<update_signature> all = supported_signatures();
  for (std::size_t i = 0; i < all.size(); i += 37) {
    if (!is_tuned(all[i])) signatures.push_back(all[i]);
  }
  return signatures;
}

auto every_golden_signature(executor_kind kind) {
  return ::testing::Combine(::testing::Values(kind), ::testing::ValuesIn(golden_signatures()));
}

class Golden : public ConformanceWith<update_signature> {};

STEPGRAPH_INSTANTIATE_FOR_EVERY_EXECUTOR(Golden, every_golden_signature);

TEST_P(Golden, StateAfterSixStepsHasTheStoredDigest) {
  const auto adapter = make(varied_problem(tested()));
  const std::string found = digest_of(*adapter, tested());
  const char* const update = std::getenv("STEPGRAPH_UPDATE_GOLDEN");
  if (kind() == executor_kind::host && update != nullptr && std::string(update) == "1") {
    write_digest(name_of(tested()), found);
    GTEST_SKIP() << "wrote " << digest_file();
  }
  EXPECT_EQ(found, read_digests()[name_of(tested())]);
}

TEST(GoldenFile, ListsTheTestedSignaturesAndNoOther) {
  std::map<std::string, std::string> digests = read_digests();
  for (const update_signature& signature : golden_signatures()) {
    EXPECT_EQ(digests.erase(name_of(signature)), 1u) << name_of(signature);
  }
  EXPECT_TRUE(digests.empty()) << digests.begin()->first;
}

}  // namespace
}  // namespace stepgraph::test
