#include "text_data.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "stepgraph/error.hpp"

namespace stepgraph::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const error& e) {
    return e.what();
  }
  return "no error";
}

TEST(TextData, NumbersTheBytesThatOccur) {
  const text_data text("cab\xffz");
  EXPECT_EQ(text.vocabulary(), 5);
  EXPECT_THAT(text.tokens(), ElementsAre(2, 0, 1, 4, 3));
}

TEST(TextData, RefusesWhatCannotBeRead) {
  EXPECT_THAT(error_of([] { text_data::from_file("/nowhere/text"); }),
              HasSubstr("'/nowhere/text': there is no such file"));
  EXPECT_THAT(error_of([] { text_data::from_file("/"); }), HasSubstr("not a regular file"));
  EXPECT_THAT(error_of([] { text_data::from_file("/dev/zero"); }), HasSubstr("not a regular file"));
}

TEST(BatchSampler, TargetsFollowTheirInputs) {
  const text_data text("abcdefghij");
  batch_sampler sampler(text, 50, 4, 1);
  const token_batch batch = sampler.next();
  ASSERT_EQ(batch.inputs.size(), 200u);
  ASSERT_EQ(batch.targets.size(), 200u);
  for (std::size_t i = 0; i < batch.inputs.size(); ++i) {
    EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
  }
  // Every passage can be drawn, the first and the last included.
  EXPECT_THAT(batch.inputs, ::testing::Contains(0));
  EXPECT_THAT(batch.targets, ::testing::Contains(9));
}

TEST(BatchSampler, SameSeedDrawsSamePassages) {
  const text_data text(std::string(200, 'a') + std::string(200, 'b'));
  batch_sampler one(text, 3, 8, 7);
  batch_sampler two(text, 3, 8, 7);
  batch_sampler other(text, 3, 8, 8);
  bool differs = false;
  for (int step = 0; step < 20; ++step) {
    const std::vector<std::int64_t> inputs = one.next().inputs;
    EXPECT_EQ(inputs, two.next().inputs);
    differs = differs || inputs != other.next().inputs;
  }
  EXPECT_TRUE(differs);
}

TEST(BatchSampler, GoesOnFromThePositionOfAnother) {
  const text_data text(std::string(200, 'a') + std::string(200, 'b'));
  batch_sampler one(text, 3, 8, 7);
  for (int step = 0; step < 5; ++step) one.next();
  batch_sampler two(text, 3, 8, 99);
  two.restore(one.position());
  for (int step = 0; step < 20; ++step) EXPECT_EQ(one.next().inputs, two.next().inputs);
  EXPECT_THAT(error_of([&] { two.restore("nowhere"); }), HasSubstr("cannot be read"));
}

TEST(BatchSampler, DrawsFromTheShortestTextThatFits) {
  const text_data text("abcde");
  batch_sampler sampler(text, 1, 4, 1);
  EXPECT_THAT(sampler.next().targets, ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(error_of([&] { batch_sampler(text, 1, 5, 1); }),
              HasSubstr("too short: it has 5 characters, and --context 5 needs at least 6"));
}

}  // namespace
}  // namespace stepgraph::cli
