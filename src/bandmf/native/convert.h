/* float16 and bfloat16 by integer arithmetic, rounded to nearest even: every compiler has it, and it does not
   depend on how a thread treats numbers that are not normal. */

#ifndef BANDMF_CONVERT_H
#define BANDMF_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline float from_bfloat16(uint16_t x) { return float_of((uint32_t)x << 16); }

static inline uint16_t to_bfloat16(float x) {
    uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40; /* NaN stays NaN */
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

static inline float from_float16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
    uint32_t normal = (rest << 13) + (112u << 23);              /* the exponents are 112 apart */
    uint32_t special = (rest << 13) | 0x7f800000;               /* infinity and NaN */
    uint32_t small = bits_of((float)(int32_t)rest * 0x1p-24f);  /* below 2^-14 */
    return float_of(sign | (rest >= 0x7c00 ? special : rest < 0x0400 ? small : normal));
}

static inline uint16_t to_float16(float x) {
    uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    uint32_t normal = (rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
    uint32_t small = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f); /* a unit of 0.5 is 2^-24 */
    uint32_t large = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (rest >= 0x477ff000 ? large : rest < 0x38800000 ? small : normal));
}

#endif
