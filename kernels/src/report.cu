#include "dependent_launch.cuh"
#include "stepgraph/kernels/cuda_launch.hpp"
#include "stepgraph/kernels/launch_shape.hpp"

namespace stepgraph::cuda {
namespace {

constexpr int threads = report_threads;

__global__ void __launch_bounds__(threads)
    report_kernel(step_block_view block, record_ring_view ring) {
  let_successors_start();
  wait_for_predecessors();
  const std::uint64_t sequence = sequence_of(*block.scalars);
  record_slot& slot = ring.slots[(sequence - 1) % ring.capacity];
  record_group* const groups = ring.groups + (sequence - 1) % ring.capacity * block.group_count;
  auto* const published = reinterpret_cast<volatile unsigned long long*>(&slot.sequence);
  if (threadIdx.x == 0) *published = 0;
  // Whoever sees a part of the new record also sees that the old one is gone, and whoever sees the
  // new number sees all of the new record.
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) fill_record(*block.scalars, slot);
  for (std::uint32_t i = threadIdx.x; i < block.group_count; i += threads) {
    groups[i] = record_of(block.progress[i]);
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *published = sequence;
}

}  // namespace

cudaError_t launch_report(const step_block_view& block, const record_ring_view& ring,
                          launch_order order, cudaStream_t stream) {
  return launch(report_kernel, 1, threads, order, stream, block, ring);
}

}  // namespace stepgraph::cuda
