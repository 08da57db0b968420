// Cast and pack of many shards in one launch. See publish.py.
//
// Compiled with these macros:
//   COMMFUSE_OUT        float, double, bf16 or fp16: the type of all destinations; sources may be of any of these
//   COMMFUSE_CAPACITY   items that the argument has room for
//
// Shards are cut into tiles; tiles are numbered through all items and every block takes an equal, contiguous share of them,
// so that the work is even whatever the sizes of the shards.

struct Item {
    const void* source;
    void* destination;
    long long numel;
    int end;                   // number of tiles of this item and of all before it
    unsigned char type;        // of the source: 0 float, 1 bf16, 2 fp16, 3 double
    unsigned char head;        // elements before the first pack
    unsigned char vector;      // 1: from `head` on both pointers are aligned to their accesses
    unsigned char reserved;
};

template <int CAPACITY> struct Publish {
    int items;
    int tiles;
    Item item[CAPACITY];
};

template <class Source, class Out> struct Copy {
    static constexpr int V = 16 / static_cast<int>(sizeof(Source));
    static constexpr int UNROLL = 4;
    static constexpr int TILE = THREADS * UNROLL * V;

    template <int W, int PACKS> static __device__ __forceinline__ void packs(const Source* source, Out* out, int stride) {
        Pack<Source, W> from[PACKS];
#pragma unroll
        for (int u = 0; u < PACKS; ++u) load(from[u], source + u * stride);
#pragma unroll
        for (int u = 0; u < PACKS; ++u) {
            Pack<Out, W> to;
#pragma unroll
            for (int k = 0; k < W; ++k) to.at[k] = Narrow<Out>::from(widen<wide_t<Source, Source>>(from[u].at[k]));
            store(out + u * stride, to);
        }
    }

    static __device__ __forceinline__ void tile(const Item& item, int number) {
        const int thread = static_cast<int>(threadIdx.x);
        const Source* source = static_cast<const Source*>(item.source);
        Out* out = static_cast<Out*>(item.destination);
        const long long begin = item.head + static_cast<long long>(number) * TILE;
        const bool whole = begin + TILE <= item.numel;
        if (whole && item.vector) {
            const long long first = begin + thread * V;
            packs<V, UNROLL>(source + first, out + first, THREADS * V);
        } else if (whole) {
#pragma unroll 1
            for (int u = 0; u < V; ++u) {
                const long long first = begin + u * THREADS * UNROLL + thread;
                packs<1, UNROLL>(source + first, out + first, THREADS);
            }
        } else {
            const long long end = item.numel;
#pragma unroll 1
            for (int u = 0; u < UNROLL; ++u) {
                const long long first = begin + (static_cast<long long>(u) * THREADS + thread) * V;
                if (item.vector && first + V <= end) {
                    packs<V, 1>(source + first, out + first, 0);
                } else {
#pragma unroll 1
                    for (long long e = first; e < end && e < first + V; ++e) packs<1, 1>(source + e, out + e, 0);
                }
            }
        }
        if (number == 0 && thread < item.head) packs<1, 1>(source + thread, out + thread, 0);
    }
};

template <class Out, int CAPACITY> __device__ __forceinline__ void publish_share(const Publish<CAPACITY>& args) {
    const int first = static_cast<int>(static_cast<long long>(args.tiles) * blockIdx.x / gridDim.x);
    const int last = static_cast<int>(static_cast<long long>(args.tiles) * (blockIdx.x + 1) / gridDim.x);
    int low = 0, high = args.items - 1;  // the first item with end > first
    while (low < high) {
        const int middle = (low + high) / 2;
        if (args.item[middle].end > first) high = middle;
        else low = middle + 1;
    }
    for (int tile = first; tile < last; ++tile) {
        while (args.item[low].end <= tile) ++low;  // also over items without elements
        const Item& item = args.item[low];
        const int number = low == 0 ? tile : tile - args.item[low - 1].end;
        switch (item.type) {  // the same in the whole block
            case 0: Copy<float, Out>::tile(item, number); break;
            case 1: Copy<bf16, Out>::tile(item, number); break;
            case 2: Copy<fp16, Out>::tile(item, number); break;
            case 3: Copy<double, Out>::tile(item, number); break;
        }
    }
}

#ifdef COMMFUSE_CAPACITY
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) publish(const __grid_constant__ Publish<COMMFUSE_CAPACITY> args) {
    publish_share<COMMFUSE_OUT, COMMFUSE_CAPACITY>(args);
}
#endif
