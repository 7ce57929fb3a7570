#include "text_data.hpp"

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>

#include "stepgraph/error.hpp"

namespace stepgraph::cli {

text_data text_data::from_file(const std::string& path) {
  std::error_code status_error;
  const std::filesystem::file_status status = std::filesystem::status(path, status_error);
  if (!std::filesystem::exists(status)) {
    throw error(fmt::format("cannot read the text '{}': there is no such file", path));
  }
  // Also keeps an endless device file from being read.
  if (!std::filesystem::is_regular_file(status)) {
    throw error(fmt::format("cannot read the text '{}': it is not a regular file", path));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw error(fmt::format("cannot read the text '{}'", path));
  if (text.empty()) throw error(fmt::format("the text '{}' is empty", path));
  return text_data(std::move(text));
}

text_data::text_data(std::string text) {
  std::array<std::int64_t, 256> index;
  index.fill(-1);
  for (const char character : text) index[static_cast<unsigned char>(character)] = 0;
  for (std::int64_t& entry : index) {
    if (entry == 0) entry = static_cast<std::int64_t>(vocabulary_++);
  }
  tokens_.reserve(text.size());
  for (const char character : text) {
    tokens_.push_back(index[static_cast<unsigned char>(character)]);
  }
}

batch_sampler::batch_sampler(const text_data& text, std::int64_t batch, std::int64_t context,
                             std::uint64_t seed)
    : text_(text),
      batch_(static_cast<std::size_t>(batch)),
      context_(static_cast<std::size_t>(context)),
      random_(seed) {
  if (text_.tokens().size() <= context_) {
    throw error(
        fmt::format("the text is too short: it has {} characters, and --context {} needs "
                    "at least {}",
                    text_.tokens().size(), context_, context_ + 1));
  }
}

token_batch batch_sampler::next() {
  const std::vector<std::int64_t>& tokens = text_.tokens();
  const std::size_t passages = tokens.size() - context_;
  token_batch result;
  result.inputs.reserve(batch_ * context_);
  result.targets.reserve(batch_ * context_);
  for (std::size_t row = 0; row < batch_; ++row) {
    // Not std::uniform_int_distribution, whose numbers differ between standard libraries.
    const auto start = tokens.begin() + static_cast<std::ptrdiff_t>(random_() % passages);
    const auto length = static_cast<std::ptrdiff_t>(context_);
    result.inputs.insert(result.inputs.end(), start, start + length);
    result.targets.insert(result.targets.end(), start + 1, start + 1 + length);
  }
  return result;
}

std::string batch_sampler::position() const {
  std::ostringstream text;
  text << random_;
  return text.str();
}

void batch_sampler::restore(const std::string& position) {
  std::istringstream text(position);
  std::mt19937_64 random;
  if (!(text >> random)) throw error("the position of the passages cannot be read");
  random_ = random;
}

std::string default_text_path() {
  const std::filesystem::path directory = "/usr/share/common-licenses";
  for (const char* name : {"GPL-3", "GPL-2", "MPL-2.0", "LGPL-2.1", "Apache-2.0"}) {
    std::error_code status_error;
    if (std::filesystem::is_regular_file(directory / name, status_error)) {
      return (directory / name).string();
    }
  }
  throw error(fmt::format(
      "no text to train on: {} holds none of the licences used by default; pass --text FILE",
      directory.string()));
}

}  // namespace stepgraph::cli
