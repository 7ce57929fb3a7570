#include "stepgraph/kernels/signature.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "common/storage.hpp"

namespace stepgraph {
namespace {

using enum storage_format;
using ::testing::HasSubstr;

TEST(Signature, NameListsTheFormatsInOrder) {
  EXPECT_EQ(name_of(update_signature{bf16, f16, f32, f32, f32}), "bf16/f16/f32/f32/f32");
  EXPECT_EQ(name_of(update_signature{}), "f32/f32/none/f32/f32");
  EXPECT_EQ(name_of(update_signature{bf16, bf16, remainder, e4m3, f16, f16}),
            "bf16/bf16/remainder/e4m3/f16/amsgrad");
}

TEST(Signature, EveryProductOfTheTableIsSupported) {
  std::set<std::string> names;
  for (const update_signature& signature : test::supported_signatures()) {
    names.insert(name_of(signature));
  }
  std::size_t expected = 0;
  for (const storage_format parameter : {f32, f16, bf16, e4m3, e5m2}) {
    for (const storage_format gradient : {f32, f16, bf16}) {
      for (const storage_format master : {none, f32, f16, remainder}) {
        if (master == remainder && parameter != bf16) continue;
        for (const storage_format exp_avg : {f32, f16, bf16, e4m3}) {
          for (const storage_format exp_avg_sq : {f32, f16, bf16, e4m3}) {
            for (const storage_format maximum : {none, exp_avg_sq}) {
              ++expected;
              EXPECT_EQ(names.count(name_of(update_signature{parameter, gradient, master, exp_avg,
                                                             exp_avg_sq, maximum})),
                        1u);
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(expected, 1536u);
  EXPECT_EQ(names.size(), expected);
}

struct unsupported_case {
  const char* name;
  update_signature signature;
  std::vector<std::string> words;
};

const unsupported_case unsupported_cases[] = {
    {"no_parameter", {none, f32, none, f32, f32}, {"parameter", "none", "e5m2"}},
    {"no_gradient", {f32, none, none, f32, f32}, {"gradient", "none", "bf16"}},
    {"no_exp_avg", {f32, f32, none, none, f32}, {"exp_avg", "none", "e4m3"}},
    {"no_exp_avg_sq", {f32, f32, none, f32, none}, {"exp_avg_sq", "none", "e4m3"}},
    {"fp8_gradient", {f32, e4m3, none, f32, f32}, {"gradient", "e4m3"}},
    {"bf16_master", {f32, f32, bf16, f32, f32}, {"master", "bf16", "remainder"}},
    {"fp8_master", {e4m3, f32, e4m3, f32, f32}, {"master", "e4m3", "f16"}},
    {"e5m2_moment", {f32, f32, none, e5m2, f32}, {"exp_avg", "e5m2"}},
    {"remainder_moment", {f32, f32, none, f32, remainder}, {"exp_avg_sq", "remainder"}},
    {"remainder_parameter", {remainder, f32, none, f32, f32}, {"parameter", "remainder"}},
    {"remainder_of_f32", {f32, f32, remainder, f32, f32}, {"parameter", "f32", "bf16"}},
    {"remainder_of_f16", {f16, f32, remainder, f32, f32}, {"parameter", "f16", "bf16"}},
    {"maximum_of_another_format", {f32, f32, none, f32, e4m3, f32}, {"max_exp_avg_sq", "f32"}},
};

class UnsupportedSignature : public ::testing::TestWithParam<unsupported_case> {};

INSTANTIATE_TEST_SUITE_P(Formats, UnsupportedSignature, ::testing::ValuesIn(unsupported_cases),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(UnsupportedSignature, SaysWhatWasFoundAndWhatWasExpected) {
  const std::string reason = why_unsupported(GetParam().signature);
  for (const std::string& word : GetParam().words) EXPECT_THAT(reason, HasSubstr(word));
}

TEST(Signature, TunedSignaturesAreSupportedAndDistinct) {
  std::set<update_signature> tuned;
  for (const update_signature& signature : test::tuned_signatures()) {
    EXPECT_EQ(why_unsupported(signature), "");
    EXPECT_TRUE(is_tuned(signature)) << name_of(signature);
    EXPECT_TRUE(tuned.insert(signature).second) << name_of(signature);
  }
  for (const update_signature& signature : test::supported_signatures()) {
    EXPECT_EQ(is_tuned(signature), tuned.contains(signature)) << name_of(signature);
  }
}

// The signatures that users of mixed precision meet.
TEST(Signature, CommonSignaturesAreTuned) {
  for (const update_signature& signature : {
           update_signature{f32, f32, none, f32, f32},
           update_signature{f32, bf16, none, f32, f32},
           update_signature{bf16, bf16, none, f32, f32},
           update_signature{f16, f16, f32, f32, f32},
           update_signature{bf16, bf16, f32, f32, f32},
           update_signature{bf16, f32, f32, f32, f32},
           update_signature{bf16, f32, f32, bf16, bf16},
           update_signature{bf16, bf16, remainder, f32, f32},
           update_signature{bf16, bf16, remainder, bf16, bf16},
           update_signature{bf16, bf16, remainder, e4m3, e4m3},
           update_signature{bf16, f32, remainder, f32, f32},
           update_signature{bf16, f32, remainder, bf16, bf16},
           update_signature{e4m3, bf16, f32, f32, f32},
           update_signature{e4m3, f32, f32, f32, f32},
       }) {
    EXPECT_TRUE(is_tuned(signature)) << name_of(signature);
  }
}

TEST(Signature, BytesCountReadsAndWrites) {
  const auto expect_bytes = [](const update_signature& signature, std::size_t read,
                               std::size_t written, std::size_t scaled) {
    EXPECT_EQ(bytes_read_per_element(signature), read) << name_of(signature);
    EXPECT_EQ(bytes_written_per_element(signature), written) << name_of(signature);
    EXPECT_EQ(block_scaled_operands(signature), scaled) << name_of(signature);
    EXPECT_EQ(update_bytes(signature, 129), 129 * (read + written) + 2 * 2 * scaled)
        << name_of(signature);
  };
  expect_bytes({f32, f32, none, f32, f32}, 16, 12, 0);
  // The stored parameter is only written where there is a master, unless it is half of it.
  expect_bytes({bf16, bf16, f32, f32, f32}, 14, 14, 0);
  expect_bytes({bf16, bf16, remainder, f32, f32}, 14, 12, 0);
  expect_bytes({bf16, bf16, remainder, e4m3, e4m3}, 8, 6, 2);
  expect_bytes({e4m3, f32, f16, f16, bf16, bf16}, 12, 9, 2);
  expect_bytes({f32, f32, none, f32, e4m3, e4m3}, 14, 10, 2);
}

}  // namespace
}  // namespace stepgraph
