#include "parameter_lists.hpp"

#include <functional>
#include <numeric>

namespace stepgraph {

std::uint64_t parameter_shape::numel() const {
  return std::accumulate(shape.begin(), shape.end(), std::uint64_t{1}, std::multiplies<>());
}

std::vector<parameter_shape> gpt2_124m_parameters() {
  constexpr std::uint64_t vocabulary = 50257;
  constexpr std::uint64_t context = 1024;
  constexpr std::uint64_t width = 768;
  constexpr int layers = 12;

  std::vector<parameter_shape> list;
  list.push_back({"wte.weight", {vocabulary, width}});
  list.push_back({"wpe.weight", {context, width}});
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "h." + std::to_string(layer) + ".";
    list.push_back({prefix + "ln_1.weight", {width}});
    list.push_back({prefix + "ln_1.bias", {width}});
    list.push_back({prefix + "attn.c_attn.weight", {width, 3 * width}});
    list.push_back({prefix + "attn.c_attn.bias", {3 * width}});
    list.push_back({prefix + "attn.c_proj.weight", {width, width}});
    list.push_back({prefix + "attn.c_proj.bias", {width}});
    list.push_back({prefix + "ln_2.weight", {width}});
    list.push_back({prefix + "ln_2.bias", {width}});
    list.push_back({prefix + "mlp.c_fc.weight", {width, 4 * width}});
    list.push_back({prefix + "mlp.c_fc.bias", {4 * width}});
    list.push_back({prefix + "mlp.c_proj.weight", {4 * width, width}});
    list.push_back({prefix + "mlp.c_proj.bias", {width}});
  }
  list.push_back({"ln_f.weight", {width}});
  list.push_back({"ln_f.bias", {width}});
  return list;
}

std::vector<parameter_shape> llama3_8b_parameters() {
  constexpr std::uint64_t vocabulary = 128256;
  constexpr std::uint64_t width = 4096;
  constexpr std::uint64_t key_value_width = 1024;  // 8 heads of 128, shared by 32 query heads
  constexpr std::uint64_t hidden = 14336;
  constexpr int layers = 32;

  std::vector<parameter_shape> list;
  list.push_back({"model.embed_tokens.weight", {vocabulary, width}});
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    list.push_back({prefix + "self_attn.q_proj.weight", {width, width}});
    list.push_back({prefix + "self_attn.k_proj.weight", {key_value_width, width}});
    list.push_back({prefix + "self_attn.v_proj.weight", {key_value_width, width}});
    list.push_back({prefix + "self_attn.o_proj.weight", {width, width}});
    list.push_back({prefix + "mlp.gate_proj.weight", {hidden, width}});
    list.push_back({prefix + "mlp.up_proj.weight", {hidden, width}});
    list.push_back({prefix + "mlp.down_proj.weight", {width, hidden}});
    list.push_back({prefix + "input_layernorm.weight", {width}});
    list.push_back({prefix + "post_attention_layernorm.weight", {width}});
  }
  list.push_back({"model.norm.weight", {width}});
  list.push_back({"lm_head.weight", {vocabulary, width}});
  return list;
}

std::vector<parameter_shape> nx4096_parameters(std::uint64_t tensors) {
  std::vector<parameter_shape> list;
  list.reserve(tensors);
  for (std::uint64_t i = 0; i < tensors; ++i) {
    list.push_back({"tensor." + std::to_string(i), {4096}});
  }
  return list;
}

std::vector<std::string> parameter_list_names() { return {"gpt2-124m", "llama3-8b", "nx4096"}; }

std::vector<parameter_shape> parameter_list(std::string_view name, std::uint64_t tensors) {
  if (name == "gpt2-124m") return gpt2_124m_parameters();
  if (name == "llama3-8b") return llama3_8b_parameters();
  if (name == "nx4096") return nx4096_parameters(tensors);
  return {};
}

}  // namespace stepgraph
