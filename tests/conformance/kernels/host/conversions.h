// Round to nearest even, in integers; after numbers.cuh.
#pragma once

inline float float_of(fp16 x) {
    const unsigned sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float subnormal = static_cast<float>(fraction) / 16777216.0f;
    return sign ? -subnormal : subnormal;
}

inline fp16 to_fp16(float x) {
    const unsigned bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    unsigned result;
    if (magnitude > 0x7f800000u) result = 0x7fffu;
    else if (magnitude >= 0x47800000u) result = 0x7c00u;  // 65536 and more
    else if (magnitude < 0x38800000u) {                   // subnormal half: the float adder rounds at the right place
        result = bits_of(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        result = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;  // a carry may reach infinity, rightly
    }
    fp16 y;
    y.bits = static_cast<unsigned short>(sign | result);
    return y;
}

inline bf16 to_bf16(float x) {
    const unsigned bits = bits_of(x);
    bf16 y;
    y.bits = static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    return y;
}
