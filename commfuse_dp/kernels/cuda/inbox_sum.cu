// out = cast(((p_0 + p_1) + p_2 + ...) / divisor) [+ out]: partials in rank order, one pass over memory. See inbox_sum.py.
//
// Compiled with these macros:
//   COMMFUSE_PARTIAL, COMMFUSE_OUT   float, double, bf16 or fp16
//   COMMFUSE_COUNT                   number of partials, 1 .. 8, unrolled; 0: any number up to 64, eight loads at a time
//   COMMFUSE_SCALING                 0: none; 1: multiply by `factor` (a power of two: exact, as the division); 2: divide by it.
//                                    A macro, because the code of a division costs registers
//   COMMFUSE_VECTOR                  1: from element `head` on all pointers are aligned to their accesses, 16 bytes per load;
//                                    0: element by element, for pointers that do not agree
//
// One block does one tile of THREADS * UNROLL packs. `out` may be one of the partials: each element is read and written by one
// thread only, and read first. Nothing is declared __restrict__, so the compiler cannot reorder that.

struct InboxSum {
    const void* partials[64];
    void* out;
    long long numel;
    double factor;
    int count;
    int head;        // elements before the first pack, < elements of a pack
    int accumulate;  // 1: add to what is in out
    int reserved;
};

template <class Partial, class Out, int COUNT, int SCALING, bool VECTOR> struct Sum {
    using Wide = wide_t<Partial, Out>;
    static constexpr int V = VECTOR ? 16 / static_cast<int>(sizeof(Partial)) : 1;
    static constexpr int BATCH = COUNT == 0 ? 8 : COUNT;                              // partials loaded before the first sum
    static constexpr int UNROLL = BATCH == 1 ? 4 : BATCH == 2 ? 2 : VECTOR ? 1 : 2;  // packs of a thread, all loaded first
    static constexpr int TILE = THREADS * UNROLL * V;

    // UNROLL packs of W elements, `stride` elements apart.
    template <int W, int PACKS> static __device__ __forceinline__ void packs(const InboxSum& args, long long first, int stride) {
        Wide total[PACKS][W];
        if (COUNT == 0) {
#pragma unroll
            for (int u = 0; u < PACKS; ++u)
#pragma unroll
                for (int k = 0; k < W; ++k) total[u][k] = -0.0f;  // the one number x with x + y == y for all y, -0.0 included
            int from = 0;
            for (; from + BATCH <= args.count; from += BATCH) batch<W, PACKS, true>(args, first, stride, from, total);
            if (from < args.count) batch<W, PACKS, false>(args, first, stride, from, total);
        } else {
            batch<W, PACKS, true>(args, first, stride, 0, total);
        }
        scale<W, PACKS>(args, total);
        finish<W, PACKS>(args, first, stride, total);
    }

    // Adds partials from .. from + BATCH - 1; WHOLE: there are that many.
    template <int W, int PACKS, bool WHOLE>
    static __device__ __forceinline__ void batch(const InboxSum& args, long long first, int stride, int from, Wide (&total)[PACKS][W]) {
        Pack<Partial, W> partials[PACKS][BATCH];
#pragma unroll
        for (int u = 0; u < PACKS; ++u)
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (WHOLE || from + i < args.count)
                    load(partials[u][i], static_cast<const Partial*>(args.partials[from + i]) + first + u * stride);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
            for (int u = 0; u < PACKS; ++u)
#pragma unroll
                for (int k = 0; k < W; ++k)
                    if (WHOLE || from + i < args.count) {
                        const Wide next = widen<Wide>(partials[u][i].at[k]);
                        total[u][k] = COUNT != 0 && i == 0 ? next : add(total[u][k], next);
                    }
    }

    template <int W, int PACKS> static __device__ __forceinline__ void scale(const InboxSum& args, Wide (&total)[PACKS][W]) {
        if (SCALING == 0) return;
        const Wide factor = static_cast<Wide>(args.factor);
#pragma unroll
        for (int u = 0; u < PACKS; ++u)
#pragma unroll
            for (int k = 0; k < W; ++k)
                total[u][k] = SCALING == 1 ? multiply(total[u][k], factor) : divide(total[u][k], factor);
    }

    template <int W, int PACKS>
    static __device__ __forceinline__ void finish(const InboxSum& args, long long first, int stride, const Wide (&total)[PACKS][W]) {
        using Native = wide_t<Out, Out>;
        Out* out = static_cast<Out*>(args.out) + first;
#pragma unroll
        for (int u = 0; u < PACKS; ++u) {
            Pack<Out, W> result;
#pragma unroll
            for (int k = 0; k < W; ++k) result.at[k] = Narrow<Out>::from(total[u][k]);
            if (args.accumulate) {  // after the cast, in out's own type: what `out += sum` does
                Pack<Out, W> before;
                load(before, static_cast<const Out*>(out + u * stride));
#pragma unroll
                for (int k = 0; k < W; ++k)
                    result.at[k] = Narrow<Out>::from(add(widen<Native>(before.at[k]), widen<Native>(result.at[k])));
            }
            store(out + u * stride, result);
        }
    }

    static __device__ __forceinline__ void tile(const InboxSum& args) {
        const int thread = static_cast<int>(threadIdx.x);
        const long long begin = args.head + static_cast<long long>(blockIdx.x) * TILE;
        if (begin + TILE <= args.numel) {
            packs<V, UNROLL>(args, begin + thread * V, THREADS * V);
        } else {  // the last tile: whole packs, and less than one pack element by element
#pragma unroll 1
            for (int u = 0; u < UNROLL; ++u) {
                const long long first = begin + (static_cast<long long>(u) * THREADS + thread) * V;
                if (first + V <= args.numel) {
                    packs<V, 1>(args, first, 0);
                } else {
#pragma unroll 1
                    for (long long e = first; e < args.numel; ++e) packs<1, 1>(args, e, 0);
                }
            }
        }
        if (blockIdx.x == 0 && thread < args.head) packs<1, 1>(args, thread, 0);
    }
};

#ifdef COMMFUSE_PARTIAL
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) inbox_sum(const __grid_constant__ InboxSum args) {
    Sum<COMMFUSE_PARTIAL, COMMFUSE_OUT, COMMFUSE_COUNT, COMMFUSE_SCALING, COMMFUSE_VECTOR>::tile(args);
}
#endif
