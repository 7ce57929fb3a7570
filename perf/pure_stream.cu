#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bench_config.hpp"
#include "device_timer.hpp"
#include "pure_stream.hpp"

namespace stepgraph::perf {
namespace {

/// The operands' sizes and accesses in one number, four bits an operand: a template argument that
/// signatures with the same traffic share.
using operand_code = std::uint64_t;
constexpr operand_code is_read = 1;
constexpr operand_code is_written = 2;
constexpr int size_shift = 2;  ///< 0, 1, 2: elements of 1, 2, 4 bytes; 3: a byte a scale block

constexpr operand_code code_of(const update_signature& signature) {
  operand_code code = 0;
  const auto add = [&](stream_operand operand, std::size_t bytes, operand_code accesses) {
    if (bytes == 0) return;
    const operand_code size = bytes == 1 ? 0 : bytes == 2 ? 1 : 2;
    code |= (size << size_shift | accesses) << 4 * static_cast<int>(operand);
  };
  const auto add_scales = [&](stream_operand operand, storage_format format) {
    if (!is_block_scaled(format)) return;
    const operand_code size = 3;
    code |= (size << size_shift | is_read | is_written) << 4 * static_cast<int>(operand);
  };
  using enum storage_format;
  constexpr operand_code both = is_read | is_written;
  // A master replaces the parameter as the input, a remainder is only a part of it.
  const bool reads_parameter = signature.master == none || signature.master == remainder;
  add(stream_operand::gradient, element_size(signature.gradient), is_read);
  add(stream_operand::parameter, element_size(signature.parameter),
      reads_parameter ? both : is_written);
  add(stream_operand::master, element_size(signature.master), both);
  add(stream_operand::exp_avg, element_size(signature.exp_avg), both);
  add(stream_operand::exp_avg_sq, element_size(signature.exp_avg_sq), both);
  add(stream_operand::max_exp_avg_sq, element_size(signature.max_exp_avg_sq), both);
  add_scales(stream_operand::master_scales, signature.master);
  add_scales(stream_operand::exp_avg_scales, signature.exp_avg);
  add_scales(stream_operand::exp_avg_sq_scales, signature.exp_avg_sq);
  add_scales(stream_operand::max_exp_avg_sq_scales, signature.max_exp_avg_sq);
  return code;
}

constexpr bool reads(operand_code code, int operand) { return code >> 4 * operand & is_read; }
constexpr bool writes(operand_code code, int operand) { return code >> 4 * operand & is_written; }
constexpr bool is_scales(operand_code code, int operand) {
  return (code >> (4 * operand + size_shift) & 3) == 3;
}
constexpr int bytes_of(operand_code code, int operand) {
  return 1 << (code >> (4 * operand + size_shift) & 3);
}

template <int Words>
struct words_type;
template <>
struct words_type<1> {
  using type = unsigned int;
};
template <>
struct words_type<2> {
  using type = uint2;
};
template <>
struct words_type<4> {
  using type = uint4;
};

/// `Words` words in one access.
template <int Words, bool Streaming>
__device__ __forceinline__ void load_words(const void* address, unsigned int* words) {
  using vector = typename words_type<Words>::type;
  __builtin_assume(__isGlobal(address));
  union {
    vector all;
    unsigned int word[Words];
  } bits;
  const auto* source = static_cast<const vector*>(address);
  bits.all = Streaming ? __ldcs(source) : *source;
#pragma unroll
  for (int i = 0; i < Words; ++i) words[i] = bits.word[i];
}

template <int Words, bool Streaming>
__device__ __forceinline__ void store_words(void* address, const unsigned int* words) {
  using vector = typename words_type<Words>::type;
  __builtin_assume(__isGlobal(address));
  union {
    vector all;
    unsigned int word[Words];
  } bits;
#pragma unroll
  for (int i = 0; i < Words; ++i) {
    unsigned int word = words[i];
    // Costs nothing. The compiler would otherwise see that the memory holds the value already, and
    // drop the store.
    asm volatile("" : "+r"(word));
    bits.word[i] = word;
  }
  auto* target = static_cast<vector*>(address);
  if (Streaming) {
    __stcs(target, bits.all);
  } else {
    *target = bits.all;
  }
}

/// Stores if `condition` is not 0, by predication: an operand that is read and not written needs an
/// instruction that uses what was read, and arithmetic on it would be scheduled between the loads.
template <int Words>
__device__ __forceinline__ void store_words_if(unsigned int condition, void* address,
                                               const unsigned int* words) {
  const auto global = static_cast<std::uint64_t>(__cvta_generic_to_global(address));
  if constexpr (Words == 4) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v4.u32 [%1], {%2, %3, %4, %5}; }" ::"r"(
            condition),
        "l"(global), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
  } else if constexpr (Words == 2) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.v2.u32 [%1], {%2, %3}; }" ::"r"(
            condition),
        "l"(global), "r"(words[0]), "r"(words[1])
        : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u32 [%1], %2; }" ::"r"(condition),
        "l"(global), "r"(words[0])
        : "memory");
  }
}

/// What one thread of a whole chunk does. Every operand moves in the widest accesses that give each
/// thread the same work, at most 16 bytes; neighbouring threads touch neighbouring memory.
template <operand_code Code, int Threads, int PerThread, bool Streaming>
struct chunk_pass {
  static constexpr int chunk = Threads * PerThread;
  unsigned int held[stream_operand_count][PerThread];

  template <int Operand>
  static constexpr int words = PerThread* bytes_of(Code, Operand) / 4;
  template <int Operand>
  static constexpr int access_words = words<Operand> < 4 ? words<Operand> : 4;

  /// Calls `move(address, words held, width, number)` for each access of this thread to an operand.
  template <int Operand, class Move>
  __device__ __forceinline__ void for_each_access(const stream_addresses& addresses, Move&& move) {
    auto* base = static_cast<char*>(addresses.data[Operand]);
    if constexpr (is_scales(Code, Operand)) {
      constexpr int scale_words = chunk / static_cast<int>(scale_block_elements) / 4;
      static_assert(scale_words > 0);
      if (threadIdx.x < scale_words) {
        move(base + (blockIdx.x * static_cast<std::uint64_t>(scale_words) + threadIdx.x) * 4,
             held[Operand], std::integral_constant<int, 1>(), 0);
      }
    } else {
      constexpr int width = access_words<Operand>;
      char* first = base + blockIdx.x * static_cast<std::uint64_t>(chunk * bytes_of(Code, Operand));
#pragma unroll
      for (int access = 0; access < words<Operand> / width; ++access) {
        move(first + (access * Threads + static_cast<int>(threadIdx.x)) * width * 4,
             held[Operand] + access * width, std::integral_constant<int, width>(), access);
      }
    }
  }

  template <int Operand>
  __device__ __forceinline__ void load(const stream_addresses& addresses) {
    if constexpr (reads(Code, Operand)) {
      for_each_access<Operand>(addresses,
                               [](const char* address, unsigned int* target, auto width, int) {
                                 load_words<decltype(width)::value, Streaming>(address, target);
                               });
    }
  }

  /// `zero` is 0, which the compiler cannot know.
  template <int Operand>
  __device__ __forceinline__ void store(const stream_addresses& addresses, unsigned int zero) {
    if constexpr (writes(Code, Operand)) {
      if constexpr (!reads(Code, Operand)) {
        // The gradient's bits, which exist for every signature: as random as real values.
#pragma unroll
        for (int i = 0; i < words<Operand>; ++i) held[Operand][i] = held[0][i % words<0>];
      }
      for_each_access<Operand>(addresses, [](char* address, unsigned int* source, auto width, int) {
        store_words<decltype(width)::value, Streaming>(address, source);
      });
    } else if constexpr (reads(Code, Operand)) {
      // A bit of `zero` for each access: for several stores under one condition, the compiler makes
      // a branch and moves the loads into it.
      for_each_access<Operand>(
          addresses, [&](char* address, unsigned int* source, auto width, int access) {
            store_words_if<decltype(width)::value>(zero & 1u << access, address, source);
          });
    }
  }

  template <int... Operand>
  __device__ __forceinline__ void run(const stream_addresses& addresses, unsigned int zero,
                                      std::integer_sequence<int, Operand...>) {
    (load<Operand>(addresses), ...);
    (store<Operand>(addresses, zero), ...);
  }
};

/// The last elements, fewer than a chunk: a byte an access.
template <operand_code Code, int Operand>
__device__ void pass_bytes(const stream_addresses& addresses, std::uint64_t first,
                           std::uint64_t elements, unsigned int zero) {
  constexpr std::uint64_t block = scale_block_elements;
  constexpr bool scales = is_scales(Code, Operand);
  const std::uint64_t begin = scales ? first / block : first * bytes_of(Code, Operand);
  const std::uint64_t end =
      scales ? (elements + block - 1) / block : elements * bytes_of(Code, Operand);
  auto* data = static_cast<volatile unsigned char*>(addresses.data[Operand]);
  for (std::uint64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const unsigned char value = reads(Code, Operand) ? data[i] : static_cast<unsigned char>(i);
    if (writes(Code, Operand)) data[i] = static_cast<unsigned char>(value ^ zero);
  }
}

template <operand_code Code, int... Operand>
__device__ __forceinline__ void pass_tail(const stream_addresses& addresses, std::uint64_t first,
                                          std::uint64_t elements, unsigned int zero,
                                          std::integer_sequence<int, Operand...>) {
  const auto pass = [&]<int Number>(std::integral_constant<int, Number>) {
    if constexpr (reads(Code, Number) || writes(Code, Number)) {
      pass_bytes<Code, Number>(addresses, first, elements, zero);
    }
  };
  (pass(std::integral_constant<int, Operand>()), ...);
}

template <operand_code Code, int Threads, int PerThread, bool Streaming>
__global__ void __launch_bounds__(Threads)
    pure_stream_kernel(const __grid_constant__ stream_addresses addresses, std::uint64_t elements,
                       unsigned int zero) {
  constexpr std::make_integer_sequence<int, stream_operand_count> operands;
  constexpr std::uint64_t chunk = Threads * PerThread;
  const std::uint64_t first = blockIdx.x * chunk;
  if (elements - first >= chunk) {
    chunk_pass<Code, Threads, PerThread, Streaming> pass;
    pass.run(addresses, zero, operands);
  } else {
    pass_tail<Code>(addresses, first, elements, zero, operands);
  }
}

struct kernel_variant {
  void (*kernel)(stream_addresses, std::uint64_t, unsigned int);
  int threads;
  int elements_per_thread;
  bool streaming;
};

template <operand_code Code, int Threads, int PerThread>
void add_variants(std::vector<kernel_variant>& variants) {
  variants.push_back(
      {pure_stream_kernel<Code, Threads, PerThread, false>, Threads, PerThread, false});
  variants.push_back(
      {pure_stream_kernel<Code, Threads, PerThread, true>, Threads, PerThread, true});
}

template <operand_code Code>
std::vector<kernel_variant> variants_of_code() {
  std::vector<kernel_variant> variants;
  add_variants<Code, 256, 8>(variants);
  add_variants<Code, 512, 4>(variants);
  add_variants<Code, 128, 8>(variants);
  add_variants<Code, 256, 4>(variants);
  add_variants<Code, 512, 8>(variants);
  return variants;
}

std::vector<kernel_variant> variants_of(const update_signature& signature) {
  using enum storage_format;
  const operand_code code = code_of(signature);
#define STEPGRAPH_TUNED_SIGNATURE(parameter, gradient, master, exp_avg, exp_avg_sq)                \
  if (constexpr operand_code listed = code_of({parameter, gradient, master, exp_avg, exp_avg_sq}); \
      code == listed) {                                                                            \
    return variants_of_code<listed>();                                                             \
  }
#include "measured_signatures.def"
#undef STEPGRAPH_TUNED_SIGNATURE
  throw std::invalid_argument("no copy kernel moves the operands of " + name_of(signature) +
                              ": list it in perf/measured_signatures.def");
}

}  // namespace

pure_stream::pure_stream(const update_signature& signature, const stream_addresses& addresses,
                         std::uint64_t elements, cudaStream_t stream)
    : addresses_(addresses), elements_(elements) {
  constexpr int measurements = 3;
  device_timer timer(stream);
  double best = 0.0;
  for (const kernel_variant& candidate : variants_of(signature)) {
    const auto enqueue = [&] {
      launch_kernel(candidate.kernel, candidate.threads, candidate.elements_per_thread, stream);
    };
    timer.seconds(enqueue);  // loads the kernel
    const int runs = runs_worth_measuring(timer.seconds(enqueue), launches_in_flight);
    std::vector<double> seconds;
    for (int i = 0; i < measurements; ++i) seconds.push_back(timer.seconds(enqueue, runs));
    const double middle = median(seconds);
    if (kernel_ != nullptr && middle >= best) continue;
    best = middle;
    kernel_ = candidate.kernel;
    threads_ = candidate.threads;
    elements_per_thread_ = candidate.elements_per_thread;
    variant_ = std::to_string(threads_) + "x" + std::to_string(elements_per_thread_) +
               (candidate.streaming ? " streaming" : "");
  }
}

void pure_stream::launch(cudaStream_t stream) const {
  launch_kernel(kernel_, threads_, elements_per_thread_, stream);
}

void pure_stream::launch_kernel(kernel_pointer kernel, int threads, int elements_per_thread,
                                cudaStream_t stream) const {
  if (elements_ == 0) return;
  const std::uint64_t chunk = static_cast<std::uint64_t>(threads) * elements_per_thread;
  const auto blocks = static_cast<unsigned int>((elements_ + chunk - 1) / chunk);
  kernel<<<blocks, threads, 0, stream>>>(addresses_, elements_, 0u);
  STEPGRAPH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace stepgraph::perf
