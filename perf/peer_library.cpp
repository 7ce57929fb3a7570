// The executors behind a C interface, so that peers.py can run them on torch's tensors through
// ctypes, in one process with what it compares. Not an installed interface.
//
// Functions return 0 or null on failure; stepgraph_peer_error then says why, on the same thread.

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stepgraph/stepgraph.hpp"
#include "stepgraph_commit.hpp"

#if defined(STEPGRAPH_HAS_PARAMETER_LISTS)
#include "parameter_lists.hpp"
#endif

#define STEPGRAPH_PEER extern "C" __attribute__((visibility("default")))

// Keep in step with stepgraph_peer.py.
extern "C" {

/// Operands of `count` tensors: an array of addresses each, null where the signature has none.
struct stepgraph_peer_tensors {
  std::uint64_t count;
  const std::uint64_t* numels;
  void* const* parameters;
  void* const* gradients;
  void* const* masters;
  void* const* exp_avgs;
  void* const* exp_avg_sqs;
};

struct stepgraph_peer_options {
  double learning_rate, beta1, beta2, eps, weight_decay;
  double max_grad_norm;  ///< 0: no clipping
  std::int32_t zero_gradients;
  std::int32_t device;     ///< CUDA ordinal, or -1: the tensors are in host memory
  std::int32_t use_graph;  ///< on a device: graph_executor rather than stream_executor
};
}
static_assert(sizeof(stepgraph_peer_tensors) == 56 && sizeof(stepgraph_peer_options) == 64);

namespace {

using namespace stepgraph;

thread_local std::string last_error;

/// Runs `body`; remembers what it throws and returns `failed` then.
template <class Result, class Body>
Result guarded(Result failed, Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return failed;
}

/// Reads "parameter/gradient/master/exp_avg/exp_avg_sq".
update_signature parse_signature(std::string_view text) {
  update_signature signature;
  for (storage_format* format : {&signature.parameter, &signature.gradient, &signature.master,
                                 &signature.exp_avg, &signature.exp_avg_sq}) {
    const std::string_view word = text.substr(0, text.find('/'));
    text.remove_prefix(word.size() == text.size() ? word.size() : word.size() + 1);
    constexpr int formats = 16;  // more than there are
    int code = 0;
    while (code < formats && word != name_of(static_cast<storage_format>(code))) ++code;
    if (code == formats || word == "unknown") {
      throw usage_error("'" + std::string(word) + "' is no storage format");
    }
    *format = static_cast<storage_format>(code);
  }
  return signature;
}

step_plan make_plan(const update_signature& signature, const stepgraph_peer_tensors& tensors,
                    const stepgraph_peer_options& options) {
  const device_location location =
      options.device < 0 ? device_location{} : device_location{device_kind::cuda, options.device};
  step_builder builder;
  const group_id group = builder.add_group({.learning_rate = options.learning_rate,
                                            .beta1 = options.beta1,
                                            .beta2 = options.beta2,
                                            .eps = options.eps,
                                            .weight_decay = options.weight_decay});
  for (std::uint64_t i = 0; i < tensors.count; ++i) {
    const auto view = [&](void* const* addresses, storage_format format) {
      return tensor_view{addresses[i], tensors.numels[i], format, location};
    };
    tensor_operands operands;
    operands.name = "tensor " + std::to_string(i);
    operands.parameter = view(tensors.parameters, signature.parameter);
    operands.gradient = view(tensors.gradients, signature.gradient);
    if (signature.master != storage_format::none) {
      operands.master = view(tensors.masters, signature.master);
    }
    operands.exp_avg = view(tensors.exp_avgs, signature.exp_avg);
    operands.exp_avg_sq = view(tensors.exp_avg_sqs, signature.exp_avg_sq);
    builder.add_tensor(group, std::move(operands));
  }
  builder.set_options(
      {.max_grad_norm = options.max_grad_norm, .zero_gradients = options.zero_gradients != 0});
  return builder.build();
}

}  // namespace

/// An executor of whichever kind, and how to launch it.
struct stepgraph_peer {
  std::unique_ptr<executor> step;
  std::function<void(void* stream)> launch;
};

namespace {

/// Fills in an executor that is launched onto streams, or not at all.
template <class Executor, class Launch, class... Arguments>
void emplace_executor(stepgraph_peer& peer, Launch launch, Arguments&&... arguments) {
  auto step = std::make_unique<Executor>(std::forward<Arguments>(arguments)...);
  peer.launch = [launch, &step = *step](void* stream) { launch(step, stream); };
  peer.step = std::move(step);
}

}  // namespace

/// What failed last on this thread.
STEPGRAPH_PEER const char* stepgraph_peer_error() { return last_error.c_str(); }

/// The source revision of the library.
STEPGRAPH_PEER const char* stepgraph_peer_commit() { return perf::commit; }

/// An executor over memory that the caller keeps until stepgraph_peer_destroy. `stream` is a
/// cudaStream_t, ignored on the host.
STEPGRAPH_PEER stepgraph_peer* stepgraph_peer_create(const char* signature,
                                                     const stepgraph_peer_tensors* tensors,
                                                     const stepgraph_peer_options* options,
                                                     [[maybe_unused]] void* stream) {
  return guarded<stepgraph_peer*>(nullptr, [&] {
    step_plan plan = make_plan(parse_signature(signature), *tensors, *options);
    auto peer = std::make_unique<stepgraph_peer>();
    if (options->device < 0) {
      emplace_executor<host_executor>(
          *peer, [](host_executor& step, void*) { step.launch(); }, std::move(plan));
      return peer.release();
    }
#if defined(STEPGRAPH_HAS_CUDA)
    const auto launch = [](auto& step, void* onto) {
      step.launch(static_cast<cudaStream_t>(onto));
    };
    if (options->use_graph != 0) {
      emplace_executor<graph_executor>(*peer, launch, std::move(plan),
                                       static_cast<cudaStream_t>(stream));
    } else {
      emplace_executor<stream_executor>(*peer, launch, std::move(plan),
                                        static_cast<cudaStream_t>(stream));
    }
    return peer.release();
#else
    throw usage_error("this build has no CUDA executors");
#endif
  });
}

/// Enqueues one step onto `stream`, or runs it on the host.
STEPGRAPH_PEER int stepgraph_peer_launch(stepgraph_peer* peer, void* stream) {
  return guarded(0, [&] {
    peer->launch(stream);
    return 1;
  });
}

STEPGRAPH_PEER int stepgraph_peer_set_learning_rate(stepgraph_peer* peer, double value) {
  return guarded(0, [&] {
    peer->step->set_learning_rate(0, value);
    return 1;
  });
}

/// Waits, and reads the global gradient norm of the latest step; negative on failure.
STEPGRAPH_PEER double stepgraph_peer_grad_norm(stepgraph_peer* peer) {
  return guarded(-1.0, [&] { return peer->step->status().grad_norm; });
}

STEPGRAPH_PEER void stepgraph_peer_destroy(stepgraph_peer* peer) { delete peer; }

/// The element counts of a model's parameters ("gpt2-124m"). Writes at most `capacity` of them and
/// returns how many there are; 0 for a model that is not known.
STEPGRAPH_PEER std::uint64_t stepgraph_peer_parameter_list(
    [[maybe_unused]] const char* model, [[maybe_unused]] std::uint64_t* numels,
    [[maybe_unused]] std::uint64_t capacity) {
  return guarded<std::uint64_t>(0, [&]() -> std::uint64_t {
#if defined(STEPGRAPH_HAS_PARAMETER_LISTS)
    const std::vector<parameter_shape> list = parameter_list(model, 0);
    for (std::uint64_t i = 0; i < list.size() && i < capacity; ++i) numels[i] = list[i].numel();
    if (!list.empty()) return list.size();
#endif
    throw usage_error("no such parameter list in this build");
  });
}
