#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace stepgraph::cli {

struct char_transformer_options {
  std::int64_t vocabulary = 0;
  std::int64_t context = 0;  ///< longest sequence
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t width = 0;  ///< a multiple of heads
};

/// One pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)).
class transformer_block : public torch::nn::Module {
 public:
  explicit transformer_block(const char_transformer_options& options);

  /// `x` is [batch, sequence, width]; `mask` is [sequence, sequence], minus infinity where a
  /// position must not look, else 0.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& mask);

 private:
  torch::Tensor attention(const torch::Tensor& x, const torch::Tensor& mask);

  std::int64_t heads_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear query_key_value_;
  torch::nn::Linear attention_out_;
  torch::nn::LayerNorm mlp_norm_;
  torch::nn::Linear mlp_in_;
  torch::nn::Linear mlp_out_;
};

/// A decoder-only transformer over characters with learned positions and an untied output head.
/// Weights start as in GPT-2, from torch's global generator.
class char_transformer : public torch::nn::Module {
 public:
  explicit char_transformer(const char_transformer_options& options);

  /// Logits [batch, sequence, vocabulary] of the tokens that follow `tokens` [batch, sequence].
  torch::Tensor forward(const torch::Tensor& tokens);

 private:
  torch::nn::Embedding token_embedding_;
  torch::nn::Embedding position_embedding_;
  std::vector<std::shared_ptr<transformer_block>> blocks_;
  torch::nn::LayerNorm final_norm_;
  torch::nn::Linear head_;
  torch::Tensor mask_;
};

}  // namespace stepgraph::cli
