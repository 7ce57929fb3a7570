#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "command.hpp"
#include "stepgraph/error.hpp"
#include "stepgraph/host_executor.hpp"
#include "stepgraph/step_builder.hpp"

#if defined(STEPGRAPH_HAS_TORCH)
#include "torch_backend.hpp"
#endif

#if defined(STEPGRAPH_HAS_CUDA)
#include <cuda_runtime_api.h>

#include "stepgraph/cuda/graph_executor.hpp"
#include "stepgraph/kernels/cuda_launch.hpp"
#endif

namespace stepgraph::cli {
namespace {

enum class finding_state {
  ok,
  off,      ///< not there; what it would give is not available
  problem,  ///< should work and does not
};

struct finding {
  std::string topic;
  finding_state state = finding_state::ok;
  std::string text;
};

const char* name_of(finding_state state) {
  switch (state) {
    case finding_state::ok:
      return "ok";
    case finding_state::off:
      return "off";
    case finding_state::problem:
      return "problem";
  }
  return "unknown";
}

/// Kernel of one tuned signature on the GPU at hand.
struct kernel_finding {
  std::string signature;
  int registers = 0;
  std::size_t local_bytes = 0;
  int threads_per_block = 0;
  int blocks_per_multiprocessor = 0;
  double occupancy = 0.0;
};

struct gpu_finding {
  std::string name;
  int index = 0;
  int compute_capability = 0;  ///< 10 * major + minor
  int multiprocessors = 0;
  std::uint64_t l2_bytes = 0;
  std::uint64_t memory_bytes = 0;
  std::vector<kernel_finding> kernels;
};

struct diagnosis {
  std::vector<finding> findings;
  std::vector<gpu_finding> gpus;
  bool host_executor = false;
  bool graph_executor = false;

  void add(std::string topic, finding_state state, std::string text) {
    findings.push_back({std::move(topic), state, std::move(text)});
  }
};

// One step of a known outcome: p = 1, g = 1, learning rate 0.1 and bias correction move the
// parameter to 0.9.
constexpr std::size_t trial_elements = 1000;
constexpr double trial_result = 0.9;

step_plan trial_plan(std::array<float*, 4> operands, device_location device) {
  const auto view = [&](float* data) {
    return tensor_view{
        .data = data, .numel = trial_elements, .format = storage_format::f32, .device = device};
  };
  step_builder builder;
  const group_id group = builder.add_group({.learning_rate = 0.1});
  builder.add_tensor(group, {.name = "trial",
                             .parameter = view(operands[0]),
                             .gradient = view(operands[1]),
                             .master = {},
                             .exp_avg = view(operands[2]),
                             .exp_avg_sq = view(operands[3])});
  builder.set_options({.skip_non_finite = true, .max_grad_norm = 1e9});
  return builder.build();
}

struct trial_data {
  std::vector<float> parameter = std::vector<float>(trial_elements, 1.0f);
  std::vector<float> gradient = std::vector<float>(trial_elements, 1.0f);
  std::vector<float> exp_avg = std::vector<float>(trial_elements, 0.0f);
  std::vector<float> exp_avg_sq = std::vector<float>(trial_elements, 0.0f);
};

std::string judge_trial(const std::vector<float>& parameter) {
  for (const float value : parameter) {
    if (!(std::abs(static_cast<double>(value) - trial_result) < 1e-6)) {
      return fmt::format("a trial step gave {} instead of {}", value, trial_result);
    }
  }
  return "";
}

void check_host(diagnosis& result) {
  std::string problem;
  try {
    trial_data data;
    host_executor executor(trial_plan(
        {data.parameter.data(), data.gradient.data(), data.exp_avg.data(), data.exp_avg_sq.data()},
        {.kind = device_kind::host, .index = 0}));
    executor.launch();
    problem = judge_trial(data.parameter);
  } catch (const std::exception& e) {
    problem = e.what();
  }
  result.host_executor = problem.empty();
  result.add("host executor", problem.empty() ? finding_state::ok : finding_state::problem,
             problem.empty() ? fmt::format("a trial step gave the right numbers; {} cores",
                                           std::thread::hardware_concurrency())
                             : problem);
}

#if defined(STEPGRAPH_HAS_CUDA)

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, name, device) == cudaSuccess ? value : 0;
}

void check_status(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the next check must not see it
  throw error(fmt::format("{}: {}", what, cudaGetErrorString(status)));
}

struct device_deleter {
  void operator()(void* data) const noexcept { cudaFree(data); }
};

void run_trial_on_gpu(int device) {
  check_status(cudaSetDevice(device), "choosing the GPU");
  const trial_data data;
  constexpr std::size_t bytes = trial_elements * sizeof(float);
  std::array<std::unique_ptr<void, device_deleter>, 4> memory;
  std::array<float*, 4> operands{};
  const std::array<const std::vector<float>*, 4> sources = {&data.parameter, &data.gradient,
                                                            &data.exp_avg, &data.exp_avg_sq};
  for (std::size_t i = 0; i < memory.size(); ++i) {
    void* allocation = nullptr;
    check_status(cudaMalloc(&allocation, bytes), "allocating GPU memory");
    memory[i].reset(allocation);
    operands[i] = static_cast<float*>(allocation);
    check_status(cudaMemcpy(allocation, sources[i]->data(), bytes, cudaMemcpyHostToDevice),
                 "copying to the GPU");
  }
  // The legacy default stream cannot be captured, but an instantiated graph can run on it.
  graph_executor executor(trial_plan(operands, {.kind = device_kind::cuda, .index = device}),
                          nullptr);
  executor.launch(nullptr);
  check_status(cudaDeviceSynchronize(), "waiting for the trial step");
  std::vector<float> parameter(trial_elements);
  check_status(cudaMemcpy(parameter.data(), operands[0], bytes, cudaMemcpyDeviceToHost),
               "copying from the GPU");
  const std::string problem = judge_trial(parameter);
  if (!problem.empty()) throw error(problem);
}

std::vector<kernel_finding> measure_kernels(int device) {
  check_status(cudaSetDevice(device), "choosing the GPU");
  const int threads = attribute(cudaDevAttrMaxThreadsPerMultiProcessor, device);
  std::vector<kernel_finding> kernels;
  const auto measure = [&](const update_signature& signature) {
    cuda::kernel_resources resources;
    check_status(cuda::update_kernel_resources(signature, &resources),
                 ("looking for the kernel of " + name_of(signature)).c_str());
    kernels.push_back(
        {.signature = name_of(signature),
         .registers = resources.registers,
         .local_bytes = resources.local_bytes,
         .threads_per_block = resources.threads_per_block,
         .blocks_per_multiprocessor = resources.max_blocks_per_multiprocessor,
         .occupancy = threads == 0 ? 0.0
                                   : static_cast<double>(resources.max_blocks_per_multiprocessor *
                                                         resources.threads_per_block) /
                                         threads});
  };
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq)     \
  measure({storage_format::parameter, storage_format::gradient, storage_format::master, \
           storage_format::exp_avg, storage_format::exp_avg_sq});
#include "stepgraph/kernels/tuned_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  return kernels;
}

void check_gpu(diagnosis& result, int device, int driver) {
  cudaDeviceProp properties{};
  const std::string topic = fmt::format("GPU {}", device);
  const cudaError_t status = cudaGetDeviceProperties(&properties, device);
  if (status != cudaSuccess) {
    cudaGetLastError();
    result.add(topic, finding_state::problem, cudaGetErrorString(status));
    return;
  }
  gpu_finding gpu{.name = properties.name,
                  .index = device,
                  .compute_capability = 10 * properties.major + properties.minor,
                  .multiprocessors = properties.multiProcessorCount,
                  .l2_bytes = static_cast<std::uint64_t>(properties.l2CacheSize),
                  .memory_bytes = properties.totalGlobalMem,
                  .kernels = {}};
  result.add(
      topic, finding_state::ok,
      fmt::format("{}, compute capability {}.{}, {} multiprocessors, {:.0f} MB L2, {:.1f} GiB",
                  gpu.name, properties.major, properties.minor, gpu.multiprocessors,
                  static_cast<double>(gpu.l2_bytes) / (1024.0 * 1024.0),
                  static_cast<double>(gpu.memory_bytes) / (1024.0 * 1024.0 * 1024.0)));

  const auto feature = [&](const char* name, bool there, const char* yes, const char* no) {
    result.add(fmt::format("{}: {}", topic, name), there ? finding_state::ok : finding_state::off,
               there ? yes : no);
  };
  feature("programmatic dependent launch", properties.major >= 9, "kernels of a step overlap",
          "needs compute capability 9.0; kernels of a step run one after the other");
  feature("memory pools", attribute(cudaDevAttrMemoryPoolsSupported, device) != 0, "supported",
          "not supported by this GPU or driver");
  feature(
      "conditional graph nodes", conditional_nodes_supported(), "supported by the driver",
      "need a driver for CUDA 12.4; foreign work that skipped steps leave out and several steps "
      "a launch are refused");
  feature("updates of single graph nodes", driver >= 11000, "supported by the driver",
          "need a newer driver");

  try {
    gpu.kernels = measure_kernels(device);
    result.add(topic + ": kernels", finding_state::ok,
               fmt::format("this program has code for it (built for {})", STEPGRAPH_ARCHITECTURES));
    run_trial_on_gpu(device);
    result.graph_executor = true;
    result.add(topic + ": graph executor", finding_state::ok,
               "a trial step gave the right numbers");
  } catch (const std::exception& e) {
    result.add(topic + (gpu.kernels.empty() ? ": kernels" : ": graph executor"),
               finding_state::problem,
               fmt::format("{}{}", e.what(),
                           gpu.kernels.empty()
                               ? fmt::format("; this program was built for {}: configure with "
                                             "-DCMAKE_CUDA_ARCHITECTURES={}-real",
                                             STEPGRAPH_ARCHITECTURES, gpu.compute_capability)
                               : std::string()));
  }
  result.gpus.push_back(std::move(gpu));
}

void check_cuda(diagnosis& result) {
  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  result.add("CUDA runtime", finding_state::ok,
             fmt::format("{}, code for {}", version_text(runtime), STEPGRAPH_ARCHITECTURES));

  int driver = 0;
  cudaDriverGetVersion(&driver);
  if (driver == 0) {
    result.add("driver", finding_state::off,
               "no NVIDIA driver is loaded; steps run on the host executor");
    return;
  }
  const bool new_enough = driver / 1000 >= runtime / 1000;
  result.add("driver", new_enough ? finding_state::ok : finding_state::problem,
             new_enough
                 ? fmt::format("for CUDA {}", version_text(driver))
                 : fmt::format("for CUDA {}, too old for the runtime {}: install a newer one",
                               version_text(driver), version_text(runtime)));

  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    cudaGetLastError();
    result.add("GPU", status == cudaErrorNoDevice ? finding_state::off : finding_state::problem,
               status == cudaSuccess ? "none" : cudaGetErrorString(status));
    return;
  }
  for (int device = 0; device < count; ++device) check_gpu(result, device, driver);
}

#else

void check_cuda(diagnosis& result) {
  const bool driver = static_cast<bool>(std::ifstream("/proc/driver/nvidia/version"));
  result.add("CUDA", finding_state::off,
             driver ? "this program was built without CUDA, though this machine has an NVIDIA "
                      "driver: configure with -DSTEPGRAPH_CUDA=ON to use it"
                    : "this program was built without CUDA; steps run on the host executor");
}

#endif

#if defined(STEPGRAPH_HAS_TORCH)

void check_torch(diagnosis& result) {
  const torch_backend torch = find_torch_backend();
  result.add("torch", finding_state::ok, torch.version);
  result.add("torch on the GPU",
             torch.cuda_problem.empty() ? finding_state::ok : finding_state::off,
             torch.cuda_problem.empty() ? "usable" : torch.cuda_problem);
}

#else

void check_torch(diagnosis& result) {
  result.add("torch", finding_state::off,
             "this program was built without torch; only 'stepgraph train' needs it");
}

#endif

std::string text_of(const diagnosis& result) {
  std::string text = "stepgraph " STEPGRAPH_VERSION "\n\n";
  std::size_t width = 0;
  for (const finding& entry : result.findings) width = std::max(width, entry.topic.size());
  for (const finding& entry : result.findings) {
    text +=
        fmt::format("{:<7}  {:<{}}  {}\n", name_of(entry.state), entry.topic, width, entry.text);
  }
  for (const gpu_finding& gpu : result.gpus) {
    if (gpu.kernels.empty()) continue;
    text += fmt::format("\nUpdate kernels on GPU {}:\n  {:<26}{:>10}{:>13}{:>8}{:>11}{:>12}\n",
                        gpu.index, "signature", "registers", "local bytes", "threads", "blocks/SM",
                        "occupancy");
    for (const kernel_finding& kernel : gpu.kernels) {
      text += fmt::format("  {:<26}{:>10}{:>13}{:>8}{:>11}{:>11.0f}%\n", kernel.signature,
                          kernel.registers, kernel.local_bytes, kernel.threads_per_block,
                          kernel.blocks_per_multiprocessor, 100.0 * kernel.occupancy);
    }
  }
  text += fmt::format("\nSteps run on: {}\n",
                      result.graph_executor  ? "the graph executor (GPU) and the host executor"
                      : result.host_executor ? "the host executor only"
                                             : "nothing: see the problems above");
  return text;
}

nlohmann::ordered_json json_of(const diagnosis& result) {
  using json = nlohmann::ordered_json;
  json findings = json::array();
  for (const finding& entry : result.findings) {
    findings.push_back(
        {{"topic", entry.topic}, {"state", name_of(entry.state)}, {"text", entry.text}});
  }
  json gpus = json::array();
  for (const gpu_finding& gpu : result.gpus) {
    json kernels = json::array();
    for (const kernel_finding& kernel : gpu.kernels) {
      kernels.push_back({{"signature", kernel.signature},
                         {"registers", kernel.registers},
                         {"local_bytes", kernel.local_bytes},
                         {"threads_per_block", kernel.threads_per_block},
                         {"blocks_per_multiprocessor", kernel.blocks_per_multiprocessor},
                         {"occupancy", kernel.occupancy}});
    }
    gpus.push_back({{"index", gpu.index},
                    {"name", gpu.name},
                    {"compute_capability", gpu.compute_capability},
                    {"multiprocessors", gpu.multiprocessors},
                    {"l2_bytes", gpu.l2_bytes},
                    {"memory_bytes", gpu.memory_bytes},
                    {"kernels", std::move(kernels)}});
  }
  return {{"version", STEPGRAPH_VERSION},
          {"host_executor", result.host_executor},
          {"graph_executor", result.graph_executor},
          {"findings", std::move(findings)},
          {"gpus", std::move(gpus)}};
}

int doctor(const std::string& json_path) {
  diagnosis result;
  check_host(result);
  check_cuda(result);
  check_torch(result);
  if (!json_path.empty()) write_output(json_path, json_of(result).dump(2) + "\n");
  if (json_path != "-") write_output("-", text_of(result));
  return result.host_executor ? exit_success : exit_failure;
}

}  // namespace

command add_doctor(CLI::App& program) {
  const auto json_path = std::make_shared<std::string>();
  CLI::App* app = program.add_subcommand(
      "doctor",
      "Say what this machine can run and why something is off. Exit code 0: at least the "
      "host executor works.");
  app->add_option("--json", *json_path, "Write the findings as JSON; '-': standard output")
      ->type_name("FILE");
  return {app, [json_path] { return doctor(*json_path); }};
}

}  // namespace stepgraph::cli
