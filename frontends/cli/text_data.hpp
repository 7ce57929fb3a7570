#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace stepgraph::cli {

/// A text as numbers: each byte's index among the bytes that occur in it.
class text_data {
 public:
  /// Throws stepgraph::error when the file cannot be read, is no regular file or is empty.
  static text_data from_file(const std::string& path);

  explicit text_data(std::string text);

  const std::vector<std::int64_t>& tokens() const noexcept { return tokens_; }
  std::int64_t vocabulary() const noexcept { return static_cast<std::int64_t>(vocabulary_); }

 private:
  std::vector<std::int64_t> tokens_;
  std::size_t vocabulary_ = 0;
};

/// Inputs and targets of a training step, row by row: `batch` rows of `context` tokens; the target
/// of a token is the one that follows it in the text.
struct token_batch {
  std::vector<std::int64_t> inputs;
  std::vector<std::int64_t> targets;
};

/// Draws passages from a text. The same seed draws the same passages on every machine.
class batch_sampler {
 public:
  /// Throws stepgraph::error when the text is too short for one passage. Borrows `text`.
  batch_sampler(const text_data& text, std::int64_t batch, std::int64_t context,
                std::uint64_t seed);

  token_batch next();

  /// Where it is in its sequence of passages, as text, for another sampler of the same text and
  /// sizes to go on from. `restore` throws stepgraph::error for a text that is none.
  std::string position() const;
  void restore(const std::string& position);

 private:
  const text_data& text_;
  std::size_t batch_;
  std::size_t context_;
  std::mt19937_64 random_;
};

/// The first text that is there of those that Debian and its relatives install; throws
/// stepgraph::error when there is none.
std::string default_text_path();

}  // namespace stepgraph::cli
