#include "stepgraph/kernels/signature.hpp"

#include <gtest/gtest.h>

#include <set>

#include "common/storage.hpp"

namespace stepgraph {
namespace {

constexpr storage_format none = storage_format::none;
constexpr storage_format f32 = storage_format::f32;
constexpr storage_format f16 = storage_format::f16;
constexpr storage_format bf16 = storage_format::bf16;

TEST(Signature, NameListsTheFormatsInOrder) {
  EXPECT_EQ(name_of(update_signature{bf16, f16, f32, f32, f32}), "bf16/f16/f32/f32/f32");
  EXPECT_EQ(name_of(update_signature{}), "f32/f32/none/f32/f32");
}

TEST(Signature, EveryProductOfParameterGradientAndMasterIsSupported) {
  std::set<std::string> names;
  for (const update_signature& signature : test::supported_signatures()) {
    names.insert(name_of(signature));
  }
  for (const storage_format parameter : {f32, f16, bf16}) {
    for (const storage_format gradient : {f32, f16, bf16}) {
      for (const storage_format master : {none, f32}) {
        EXPECT_EQ(names.count(name_of(update_signature{parameter, gradient, master, f32, f32})),
                  1u);
      }
    }
  }
}

TEST(Signature, RequiredOperandsCannotBeAbsent) {
  EXPECT_FALSE(is_supported({none, f32, none, f32, f32}));
  EXPECT_FALSE(is_supported({f32, none, none, f32, f32}));
  EXPECT_FALSE(is_supported({f32, f32, none, none, f32}));
  EXPECT_FALSE(is_supported({f32, f32, none, f32, none}));
}

TEST(Signature, TunedSignaturesAreSupported) {
  int tuned = 0;
  for (const update_signature& signature : test::supported_signatures()) {
    tuned += is_tuned(signature) ? 1 : 0;
  }
  int listed = 0;
#define STEPGRAPH_TUNED_SIGNATURE(...) ++listed;
#include "stepgraph/kernels/tuned_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  EXPECT_EQ(tuned, listed);
  EXPECT_TRUE(is_tuned({bf16, bf16, f32, f32, f32}));
  EXPECT_FALSE(is_tuned({f16, bf16, none, f32, f32}));
}

TEST(Signature, BytesPerElementCountReadsAndWrites) {
  EXPECT_EQ(bytes_per_element({f32, f32, none, f32, f32}), 28u);
  // The stored parameter is only written where there is a master.
  EXPECT_EQ(bytes_per_element({bf16, bf16, f32, f32, f32}), 28u);
  EXPECT_EQ(bytes_per_element({bf16, bf16, none, f32, f32}), 22u);
  EXPECT_EQ(bytes_per_element({bf16, f32, f32, f32, f32}), 30u);
}

}  // namespace
}  // namespace stepgraph
