// Number types and memory access of the kernels in this folder. nvrtc.py puts this text in front of each of them.
//
// No #include: NVRTC then needs no header path of a CUDA toolkit, and the same text is compiled by NVRTC (users), by nvcc
// (tests: resources, SASS) and as C++ of the host (tests: arithmetic), where COMMFUSE_HOST is defined and a shim supplies the
// few intrinsics. Kernels are written without cooperation between threads (no shared memory, no shuffles), so that a loop over
// blocks and threads is an exact emulation of a launch.
//
// Every access to memory goes through load() and store() below, and through no other way: the shim checks each of them for
// alignment and bounds.

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

// The type that a sum of these two types is done in: float for the half types, else the wider of the two.
template <class A, class B> struct wide_of { using type = float; };
template <class A> struct wide_of<A, double> { using type = double; };
template <class B> struct wide_of<double, B> { using type = double; };
template <> struct wide_of<double, double> { using type = double; };
template <class A, class B> using wide_t = typename wide_of<A, B>::type;

#ifndef COMMFUSE_HOST
// One rounding each, to nearest even; subnormal numbers are kept (NVRTC and nvcc: --ftz=false, the default).
__device__ __forceinline__ float float_of(fp16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ __forceinline__ fp16 to_fp16(float x) { fp16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
__device__ __forceinline__ bf16 to_bf16(float x) { bf16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
#endif
__device__ __forceinline__ float float_of(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// widen<T>(x): exact. T is float or double, never narrower than x.
template <class T> __device__ __forceinline__ T widen(float x) { return static_cast<T>(x); }
template <class T> __device__ __forceinline__ T widen(double x) { return static_cast<T>(x); }
template <class T> __device__ __forceinline__ T widen(bf16 x) { return static_cast<T>(float_of(x)); }
template <class T> __device__ __forceinline__ T widen(fp16 x) { return static_cast<T>(float_of(x)); }

// narrow<T>(x): as torch casts. A double becomes a half by way of float, there as here.
template <class T> struct Narrow;
template <> struct Narrow<double> { template <class W> static __device__ __forceinline__ double from(W x) { return x; } };
template <> struct Narrow<float> { template <class W> static __device__ __forceinline__ float from(W x) { return static_cast<float>(x); } };
template <> struct Narrow<bf16> { template <class W> static __device__ __forceinline__ bf16 from(W x) { return to_bf16(static_cast<float>(x)); } };
template <> struct Narrow<fp16> { template <class W> static __device__ __forceinline__ fp16 from(W x) { return to_fp16(static_cast<float>(x)); } };

// Arithmetic by name: never contracted to an FMA, never reassociated, division correctly rounded.
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double divide(double a, double b) { return __ddiv_rn(a, b); }

// V neighbouring numbers in as few accesses as there can be: 2, 4, 8 or 16 bytes, or several of 16. The address must be
// aligned to the access. Read once and not needed again by this kernel: evict-first (.cs).
template <int BYTES> struct Word;
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

template <class T, int V> struct Pack {
    static constexpr int BYTES = static_cast<int>(sizeof(T)) * V;
    static constexpr int ACCESS = BYTES < 16 ? BYTES : 16;
    using Access = typename Word<ACCESS>::type;
    union {
        T at[V];
        Access words[BYTES / ACCESS];
    };
};

template <class T, int V> __device__ __forceinline__ void load(Pack<T, V>& to, const T* from) {
    using Access = typename Pack<T, V>::Access;
#pragma unroll
    for (int i = 0; i < Pack<T, V>::BYTES / Pack<T, V>::ACCESS; ++i)
        to.words[i] = __ldcs(reinterpret_cast<const Access*>(from) + i);
}

template <class T, int V> __device__ __forceinline__ void store(T* to, const Pack<T, V>& from) {
    using Access = typename Pack<T, V>::Access;
#pragma unroll
    for (int i = 0; i < Pack<T, V>::BYTES / Pack<T, V>::ACCESS; ++i)
        __stcg(reinterpret_cast<Access*>(to) + i, from.words[i]);
}

constexpr int THREADS = 256;
constexpr int BLOCKS = 4;  // of a multiprocessor at once: 64 registers a thread. Without it ptxas aims higher and spills
