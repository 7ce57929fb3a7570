#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace stepgraph::test {

/// Expects `call` to throw exactly this kind of error with every one of the words in its message.
template <class Error, class Call>
void expect_error(Call&& call, const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown, expected words: " << ::testing::PrintToString(words);
  } catch (const Error& error) {
    EXPECT_EQ(typeid(error), typeid(Error));
    for (const std::string& word : words) {
      EXPECT_THAT(std::string(error.what()), ::testing::HasSubstr(word));
    }
  }
}

}  // namespace stepgraph::test
