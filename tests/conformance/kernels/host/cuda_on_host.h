// What numbers.cuh and the kernels need of CUDA, for a C++ compiler of the host. A launch is a loop over blocks and threads,
// which is exact because these kernels' threads do not cooperate. Every access is checked and counted.
#pragma once
#include <cstdint>
#include <cstring>

#define COMMFUSE_HOST 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;

// Allowed memory and what was done with it; filled and read by the tests.
struct Range { uint64_t begin, end; int writable; };
struct Watch {
    Range ranges[2200];
    int count;
    int64_t misaligned, outside;        // accesses that a GPU would have trapped on, or that read or wrote a neighbour's data
    int64_t bytes_read, bytes_written;
    int64_t reads, reads_of_16;         // accesses
};
static Watch watch;

inline void check(const void* place, int bytes, int write) {
    const uint64_t begin = reinterpret_cast<uint64_t>(place);
    if (begin % bytes) ++watch.misaligned;
    bool inside = false;
    for (int i = 0; i < watch.count && !inside; ++i) {
        const Range& range = watch.ranges[i];
        inside = begin >= range.begin && begin + bytes <= range.end && (!write || range.writable);
    }
    if (!inside) ++watch.outside;
    if (write) {
        watch.bytes_written += bytes;
    } else {
        watch.bytes_read += bytes;
        ++watch.reads;
        if (bytes == 16) ++watch.reads_of_16;
    }
}

template <class T> T __ldcs(const T* from) {
    check(from, sizeof(T), 0);
    T value;
    memcpy(&value, from, sizeof(T));
    return value;
}
template <class T> void __stcg(T* to, T value) {
    check(to, sizeof(T), 1);
    memcpy(to, &value, sizeof(T));
}

inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
inline unsigned bits_of(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __ddiv_rn(double a, double b) { return a / b; }

// The three conversions that a GPU has instructions for. numbers.cuh declares the types.
struct bf16;
struct fp16;
float float_of(fp16 x);
fp16 to_fp16(float x);
bf16 to_bf16(float x);
