#include "operand_memory.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(STEPGRAPH_HAS_CUDA)
#include "device_data.hpp"
#include "stepgraph/cuda/check.hpp"
#endif

namespace stepgraph::perf {
namespace {

/// Of the widest vectors.
constexpr std::size_t host_alignment = 64;

operand_memory allocate(std::uint64_t bytes, device_location location) {
#if defined(STEPGRAPH_HAS_CUDA)
  if (location.kind == device_kind::cuda) {
    void* data = nullptr;
    STEPGRAPH_CUDA_CHECK(cudaMalloc(&data, bytes));
    return {data, [](void* memory) { static_cast<void>(cudaFree(memory)); }};
  }
#endif
  if (location.kind != device_kind::host) throw std::bad_alloc();
  void* data = std::aligned_alloc(host_alignment,
                                  (bytes + host_alignment - 1) / host_alignment * host_alignment);
  if (data == nullptr) throw std::bad_alloc();
  return {data, std::free};
}

/// In parallel, so that each page is first touched, and placed, by a thread that will use it.
template <storage_format Format>
void fill_on_host(void* data, std::uint64_t elements, const random_range& range) {
  auto* target = static_cast<typename stored_element<Format>::type*>(data);
#pragma omp parallel for schedule(static)
  for (std::uint64_t i = 0; i < elements; ++i) target[i] = random_element<Format>(range, i);
}

}  // namespace

operand_memory random_operand(storage_format format, std::uint64_t elements,
                              const random_range& range, device_location location) {
  operand_memory memory = allocate(elements * element_size(format), location);
#if defined(STEPGRAPH_HAS_CUDA)
  if (location.kind == device_kind::cuda) {
    STEPGRAPH_CUDA_CHECK(cuda_fill_random(memory.get(), format, elements, range));
    return memory;
  }
#endif
  with_format(format, [&](auto constant) {
    fill_on_host<decltype(constant)::value>(memory.get(), elements, range);
  });
  return memory;
}

operand_memory constant_operand(std::uint8_t value, std::uint64_t bytes, device_location location) {
  operand_memory memory = allocate(bytes, location);
#if defined(STEPGRAPH_HAS_CUDA)
  if (location.kind == device_kind::cuda) {
    STEPGRAPH_CUDA_CHECK(cudaMemset(memory.get(), value, bytes));
    return memory;
  }
#endif
  std::memset(memory.get(), value, bytes);
  return memory;
}

}  // namespace stepgraph::perf
