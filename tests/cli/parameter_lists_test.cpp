#include "parameter_lists.hpp"

#include <gtest/gtest.h>

#include <set>

namespace stepgraph {
namespace {

std::uint64_t total(const std::vector<parameter_shape>& list) {
  std::uint64_t sum = 0;
  for (const parameter_shape& parameter : list) sum += parameter.numel();
  return sum;
}

TEST(ParameterLists, Gpt2HasThePublishedNumberOfParameters) {
  const auto list = gpt2_124m_parameters();
  EXPECT_EQ(list.size(), 148u);
  EXPECT_EQ(total(list), 124'439'808u);
  EXPECT_EQ(list.front().name, "wte.weight");
  EXPECT_EQ(list.front().shape, (std::vector<std::uint64_t>{50257, 768}));
  EXPECT_EQ(list.back().name, "ln_f.bias");
}

TEST(ParameterLists, Llama3HasThePublishedNumberOfParameters) {
  const auto list = llama3_8b_parameters();
  EXPECT_EQ(list.size(), 291u);
  EXPECT_EQ(total(list), 8'030'261'248u);
  EXPECT_EQ(list[2].name, "model.layers.0.self_attn.k_proj.weight");
  EXPECT_EQ(list[2].shape, (std::vector<std::uint64_t>{1024, 4096}));
}

TEST(ParameterLists, ShortVectorsAreAsManyAsAskedFor) {
  EXPECT_EQ(nx4096_parameters(148).size(), 148u);
  EXPECT_EQ(total(nx4096_parameters(148)), 606'208u);
  EXPECT_TRUE(nx4096_parameters(0).empty());
}

TEST(ParameterLists, NamesAreUniqueWithinAList) {
  for (const std::string& name : parameter_list_names()) {
    std::set<std::string> names;
    for (const parameter_shape& parameter : parameter_list(name, 12)) {
      EXPECT_TRUE(names.insert(parameter.name).second) << name << ": " << parameter.name;
    }
  }
}

TEST(ParameterLists, EveryNameHasAList) {
  for (const std::string& name : parameter_list_names()) {
    EXPECT_FALSE(parameter_list(name, 3).empty()) << name;
  }
  EXPECT_EQ(parameter_list("nx4096", 3).size(), 3u);
  EXPECT_TRUE(parameter_list("gpt2", 3).empty());
}

}  // namespace
}  // namespace stepgraph
