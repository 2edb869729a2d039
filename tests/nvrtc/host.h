/* What CUDA C++ has and C++ lacks, so that a host's compiler takes the kernels of update.c. */
#include <cmath>
#include <cstdint>
#include <cstring>

#define __CUDACC__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct place {
    unsigned x, y, z;
};
static thread_local place blockIdx, threadIdx, blockDim, gridDim;

static inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
