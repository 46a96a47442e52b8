// y = x W^T for two matrices of different formats that share x, side by side in one grid: linear.cu's ring form twice.
// Source: linear.py. A value has the bits that its matrix alone would give it: it is the same code with the same plan.
//
// Every macro of linear.cu is PICK(of the first matrix, of the second). Both have blocks of as many threads, no clusters,
// and the shared memory of the one that needs more.

#include "stream.cuh"
#include "e4m3.cuh"
#include "experts.cuh"

#define PICK(first, second) first
namespace first {
#include "linear.cu"
}
#undef PICK
#define PICK(first, second) second
namespace second {
#include "linear.cu"
}

struct Arguments {
  first::Arguments first;
  second::Arguments second;
};

extern "C" __global__ void __launch_bounds__(first::THREADS, PER_SM) linear_pair_kernel(const __grid_constant__ Arguments a) {
  if (blockIdx.x < FIRST_BLOCK)
    first::linear_block(a.first);
  else
    second::linear_block(a.second);
}
