// Occupies the multiprocessors until the host says otherwise. See hold.py.
//
// A block's first thread looks at a word of pinned host memory; the others wait for it at a barrier. Both keep their place on the
// multiprocessor. Every block ends by itself after `limit_ns`, whatever the host does.

struct Hold {
    volatile unsigned* words;  // pinned host memory: [0] leave (written by the host), [1] all blocks are here, [2] limit reached
    unsigned* count;           // device memory: blocks that have begun
    unsigned long long limit_ns;
};

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void __launch_bounds__(COMMFUSE_HOLD_THREADS, 2) hold(const __grid_constant__ Hold args) {
    if (threadIdx.x == 0) {
        const unsigned long long begun = nanoseconds();
        if (atomicAdd(args.count, 1u) + 1u == gridDim.x) {
            args.words[1] = 1u;
            __threadfence_system();
        }
        while (args.words[0] == 0u) {
            if (nanoseconds() - begun > args.limit_ns) {
                args.words[2] = 1u;
                break;
            }
            __nanosleep(50000);  // rarely: these reads cross the link whose copies are looked at
        }
    }
    __syncthreads();
}
