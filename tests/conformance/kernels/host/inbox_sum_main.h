// One launch of inbox_sum.cu; which instantiation, by the macros' values. Returns 0, or 1 if it was not compiled.
template <class Partial, class Out, int COUNT, int SCALING, int VECTOR> void launch(const InboxSum& args, int blocks) {
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < static_cast<unsigned>(blocks); ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) Sum<Partial, Out, COUNT, SCALING, VECTOR>::tile(args);
}

extern "C" Watch* watched() { return &watch; }
extern "C" int argument_bytes() { return sizeof(InboxSum); }
extern "C" int inbox_sum(const char* key, const InboxSum* args, int blocks) {
#define CASE(P, O, N, S, V) if (!strcmp(key, #P " " #O " " #N " " #S " " #V)) { launch<P, O, N, S, V>(*args, blocks); return 0; }
#define BOTH(P, O, N) CASE(P, O, N, 0, 0) CASE(P, O, N, 0, 1) CASE(P, O, N, 1, 0) CASE(P, O, N, 1, 1) CASE(P, O, N, 2, 0) CASE(P, O, N, 2, 1)
#define OUTS(P, N) BOTH(P, float, N) BOTH(P, bf16, N) BOTH(P, fp16, N) BOTH(P, double, N)
    OUTS(bf16, 2) OUTS(fp16, 2) OUTS(float, 2) OUTS(double, 2)
    BOTH(bf16, float, 1) BOTH(bf16, float, 3) BOTH(bf16, float, 4) BOTH(bf16, float, 5)
    BOTH(bf16, float, 6) BOTH(bf16, float, 7) BOTH(bf16, float, 8) BOTH(bf16, float, 0)
    BOTH(float, bf16, 1) BOTH(float, float, 4) BOTH(fp16, fp16, 0) BOTH(double, double, 0)
    return 1;
}
