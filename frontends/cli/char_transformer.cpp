#include "char_transformer.hpp"

#include <cmath>
#include <limits>
#include <string>

namespace stepgraph::cli {
namespace {

torch::nn::LayerNorm layer_norm(std::int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

}  // namespace

transformer_block::transformer_block(const char_transformer_options& options)
    : heads_(options.heads),
      attention_norm_(register_module("attention_norm", layer_norm(options.width))),
      query_key_value_(
          register_module("query_key_value", torch::nn::Linear(options.width, 3 * options.width))),
      attention_out_(
          register_module("attention_out", torch::nn::Linear(options.width, options.width))),
      mlp_norm_(register_module("mlp_norm", layer_norm(options.width))),
      mlp_in_(register_module("mlp_in", torch::nn::Linear(options.width, 4 * options.width))),
      mlp_out_(register_module("mlp_out", torch::nn::Linear(4 * options.width, options.width))) {
  const double deviation = 0.02;
  // Every block adds twice to the residual stream; this keeps its size independent of the depth.
  const double residual_deviation =
      deviation / std::sqrt(2.0 * static_cast<double>(options.layers));
  const torch::NoGradGuard no_grad;
  query_key_value_->weight.normal_(0.0, deviation);
  attention_out_->weight.normal_(0.0, residual_deviation);
  mlp_in_->weight.normal_(0.0, deviation);
  mlp_out_->weight.normal_(0.0, residual_deviation);
  for (const torch::nn::Linear& linear : {query_key_value_, attention_out_, mlp_in_, mlp_out_}) {
    linear->bias.zero_();
  }
}

torch::Tensor transformer_block::attention(const torch::Tensor& x, const torch::Tensor& mask) {
  const std::int64_t batch = x.size(0);
  const std::int64_t sequence = x.size(1);
  const std::int64_t width = x.size(2);
  const std::int64_t head_width = width / heads_;
  // [3, batch, heads, sequence, head width]
  const torch::Tensor projected = query_key_value_->forward(x)
                                      .view({batch, sequence, 3, heads_, head_width})
                                      .permute({2, 0, 3, 1, 4});
  // Plain matrix products: unlike the fused attention kernels on a GPU they give the same bits in
  // every run.
  const torch::Tensor scores =
      torch::matmul(projected[0] / std::sqrt(static_cast<double>(head_width)),
                    projected[1].transpose(-2, -1)) +
      mask;
  const torch::Tensor mixed = torch::matmul(torch::softmax(scores, -1), projected[2]);
  return attention_out_->forward(mixed.transpose(1, 2).reshape({batch, sequence, width}));
}

torch::Tensor transformer_block::forward(const torch::Tensor& x, const torch::Tensor& mask) {
  const torch::Tensor attended = x + attention(attention_norm_->forward(x), mask);
  return attended + mlp_out_->forward(torch::gelu(mlp_in_->forward(mlp_norm_->forward(attended))));
}

char_transformer::char_transformer(const char_transformer_options& options)
    : token_embedding_(register_module("token_embedding",
                                       torch::nn::Embedding(options.vocabulary, options.width))),
      position_embedding_(register_module("position_embedding",
                                          torch::nn::Embedding(options.context, options.width))),
      final_norm_(layer_norm(options.width)),
      head_(torch::nn::LinearOptions(options.width, options.vocabulary).bias(false)) {
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    blocks_.push_back(register_module("block" + std::to_string(layer),
                                      std::make_shared<transformer_block>(options)));
  }
  register_module("final_norm", final_norm_);
  register_module("head", head_);
  mask_ = register_buffer("mask", torch::full({options.context, options.context},
                                              -std::numeric_limits<float>::infinity())
                                      .triu(1));
  const torch::NoGradGuard no_grad;
  token_embedding_->weight.normal_(0.0, 0.02);
  position_embedding_->weight.normal_(0.0, 0.02);
  head_->weight.normal_(0.0, 0.02);
}

torch::Tensor char_transformer::forward(const torch::Tensor& tokens) {
  const std::int64_t sequence = tokens.size(1);
  torch::Tensor x =
      token_embedding_->forward(tokens) + position_embedding_->weight.narrow(0, 0, sequence);
  const torch::Tensor mask = mask_.narrow(0, 0, sequence).narrow(1, 0, sequence);
  for (const std::shared_ptr<transformer_block>& block : blocks_) x = block->forward(x, mask);
  return head_->forward(final_norm_->forward(x));
}

}  // namespace stepgraph::cli
