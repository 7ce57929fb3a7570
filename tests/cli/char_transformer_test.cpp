#include "char_transformer.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace stepgraph::cli {
namespace {

constexpr char_transformer_options options{
    .vocabulary = 11, .context = 8, .layers = 2, .heads = 2, .width = 12};

TEST(CharTransformer, HasTheParametersOfItsShape) {
  const char_transformer model(options);
  std::int64_t count = 0;
  for (const torch::Tensor& parameter : model.parameters()) count += parameter.numel();
  // Embeddings and head, final norm; in a block two norms and the weights and biases of q, k, v,
  // output and the two layers of the MLP.
  const std::int64_t width = options.width;
  const std::int64_t block = 2 * 2 * width + 12 * width * width + (3 + 1 + 4 + 1) * width;
  EXPECT_EQ(count, (2 * options.vocabulary + options.context) * width + 2 * width + 2 * block);
}

TEST(CharTransformer, DoesNotSeeTheFuture) {
  torch::manual_seed(3);
  char_transformer model(options);
  const torch::Tensor tokens = torch::randint(options.vocabulary, {2, options.context});
  torch::Tensor changed = tokens.clone();
  changed.narrow(1, 5, 3).copy_((tokens.narrow(1, 5, 3) + 1).remainder(options.vocabulary));
  const torch::Tensor before = model.forward(tokens.to(torch::kInt64));
  const torch::Tensor after = model.forward(changed.to(torch::kInt64));
  EXPECT_TRUE(torch::equal(before.narrow(1, 0, 5), after.narrow(1, 0, 5)));
  EXPECT_FALSE(torch::allclose(before.narrow(1, 5, 3), after.narrow(1, 5, 3)));
}

TEST(CharTransformer, SeesItsPast) {
  torch::manual_seed(3);
  char_transformer model(options);
  const torch::Tensor tokens = torch::zeros({1, options.context}, torch::kInt64);
  torch::Tensor changed = tokens.clone();
  changed[0][0] = 1;
  const torch::Tensor difference = (model.forward(tokens) - model.forward(changed)).abs();
  EXPECT_GT(difference[0][options.context - 1].max().item<float>(), 0.0f);
}

TEST(CharTransformer, StartsNearTheUniformGuess) {
  torch::manual_seed(1);
  char_transformer model(options);
  const torch::Tensor tokens =
      torch::randint(options.vocabulary, {16, options.context}).to(torch::kInt64);
  const double loss =
      torch::nn::functional::cross_entropy(model.forward(tokens).flatten(0, 1), tokens.flatten())
          .item<double>();
  EXPECT_NEAR(loss, std::log(static_cast<double>(options.vocabulary)), 0.1);
}

TEST(CharTransformer, EveryParameterGetsAGradient) {
  char_transformer model(options);
  const torch::Tensor tokens =
      torch::randint(options.vocabulary, {4, options.context}).to(torch::kInt64);
  torch::nn::functional::cross_entropy(model.forward(tokens).flatten(0, 1), tokens.flatten())
      .backward();
  for (const auto& parameter : model.named_parameters()) {
    ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
    EXPECT_GT(parameter.value().grad().abs().max().item<float>(), 0.0f) << parameter.key();
  }
}

TEST(CharTransformer, SameSeedSameWeights) {
  torch::manual_seed(9);
  const char_transformer one(options);
  torch::manual_seed(9);
  const char_transformer two(options);
  const auto first = one.parameters();
  const auto second = two.parameters();
  ASSERT_EQ(first.size(), second.size());
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(torch::equal(first[i], second[i]));
}

}  // namespace
}  // namespace stepgraph::cli
