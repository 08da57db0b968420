// One launch of publish.cu; which instantiation, by the macros' values. Returns 0, or 1 if it was not compiled.
template <class Out, int CAPACITY> void launch(const void* argument, int blocks) {
    gridDim.x = blocks;
    const Publish<CAPACITY>& args = *static_cast<const Publish<CAPACITY>*>(argument);
    for (blockIdx.x = 0; blockIdx.x < static_cast<unsigned>(blocks); ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) publish_share<Out, CAPACITY>(args);
}

extern "C" Watch* watched() { return &watch; }
extern "C" int argument_bytes(int capacity) {
    return capacity == 16 ? sizeof(Publish<16>) : capacity == 120 ? sizeof(Publish<120>) : sizeof(Publish<1000>);
}
extern "C" int publish(const char* key, const void* argument, int blocks) {
#define CASE(O, C) if (!strcmp(key, #O " " #C)) { launch<O, C>(argument, blocks); return 0; }
    CASE(float, 16) CASE(bf16, 16) CASE(fp16, 16) CASE(double, 16) CASE(bf16, 120) CASE(bf16, 1000)
    return 1;
}
