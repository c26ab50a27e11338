/* From words to normals: Box-Muller with polynomials, and the draw of one group (docs/noise.md).

   u and t are those of the specification, bit for bit. The polynomials are least-maximum fits made for this file:
   their own errors, relative, are 6e-9 for the logarithm, 4e-9 for the sine and 1e-10 for the cosine, so what
   remains is the rounding of float32. */

#ifndef BANDMF_NORMALS_H
#define BANDMF_NORMALS_H

#include "chacha.h"
#include "noise.h"

/* float32 of 32 bits without a sign, rounded once: both halves are exact, and so is the product. */
static inline reals to_real(words x) {
#if defined(__AVX512F__) && WIDTH == 16
    return __builtin_convertvector(x, reals);
#else
    reals high = __builtin_convertvector((ints)(x >> 16), reals);
    reals low = __builtin_convertvector((ints)(x & 0xffff), reals);
    return high * 65536.0f + low;
#endif
}

static inline reals uniform(words high, words low) {
    return to_real(high) * 0x1p-32f + to_real(low | 1) * 0x1p-64f;
}

static inline reals turn(words angle) { return __builtin_convertvector((ints)angle, reals) * 0x1p-31f; }

/* sqrt(-2 ln u): u = 2^e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2), and
   -2 ln(1 + f) = -2 f + f^2 + f^3 P(f). The two parts of 2 ln 2 add up to it; e times the first is exact. */
static inline reals radius(reals u) {
    ints e = ((ints)u - 0x3f3504f3) >> 23;
    reals f = (reals)((ints)u - (e << 23)) - 1.0f;
    reals exponent = __builtin_convertvector(e, reals);
    reals p = f * 0.15269001f - 0.25523164f;
    p = p * f + 0.26320367f;
    p = p * f - 0.28403515f;
    p = p * f + 0.33246714f;
    p = p * f - 0.40002454f;
    p = p * f + 0.50001642f;
    p = p * f - 0.66666663f;
    reals square = f * f;
    reals small = exponent * -1.9046542e-9f + f * square * p;
    return square_root(exponent * -1.38629435f + (f * -2.0f + (square + small)));
}

/* cos(pi t) and sin(pi t) for t in [-1, 1]: t = q / 2 + r with |r| <= 1/4, exactly; q turns the quadrant. */
static inline void cosine_sine(reals t, reals *cosine, reals *sine) {
    reals shifted = t * 2.0f + 12582912.0f; /* 1.5 * 2^23: the sum is rounded to a whole number */
    ints q = (ints)shifted - 0x4b400000;
    reals r = t - (shifted - 12582912.0f) * 0.5f;
    reals s = r * r;
    reals p = s * -0.58947964f + 2.5498105f;
    p = p * s - 5.1677091f;
    reals inside_sine = r * (s * p) + r * -8.7422777e-8f + r * 3.14159274f;
    reals c = s * 0.23142954f - 1.33505846f;
    c = c * s + 4.0587079f;
    c = c * s - 4.93480217f;
    reals inside_cosine = c * s + 1.0f;
    ints odd = -(q & 1);
    ints minus_sine = (q & 2) << 30, minus_cosine = ((q + 1) & 2) << 30;
    *sine = (reals)((ints)either(odd, inside_cosine, inside_sine) ^ minus_sine);
    *cosine = (reals)((ints)either(odd, inside_sine, inside_cosine) ^ minus_cosine);
}

static inline void box_muller(words high, words low, words angle, reals *first, reals *second) {
    reals length = radius(uniform(high, low)), cosine, sine;
    cosine_sine(turn(angle), &cosine, &sine);
    *first = length * cosine;
    *second = length * sine;
}

#define PAIRS (BANDMF_GROUP / 2)
#define PLANE (PAIRS / 16)     /* blocks in a plane */
#define BATCH (16 * WIDTH)     /* pairs that are drawn at a time */
#define BATCHES (PAIRS / BATCH)

/* Lane by block, word by word, becomes block by block in memory. */
static inline void store_transposed(const reals x[16], float *out) {
    for (int part = 0; part < 16; part += WIDTH) {
        reals tile[WIDTH];
        memcpy(tile, x + part, sizeof tile);
        transpose(tile);
        for (int k = 0; k < WIDTH; k++) memcpy(out + 16 * k + part, &tile[k], sizeof tile[k]);
    }
}

static inline void draw_batch(const struct bandmf_step *step, const uint32_t nonce[3], int64_t group, int batch,
                              float *z) {
    uint32_t counter = (uint32_t)(group * 3 * PLANE) + (uint32_t)(batch * WIDTH);
    words high[16], low[16], angle[16];
    reals first[16], second[16];
    chacha(step->key, nonce, counter, step->cipher_rounds, high);
    chacha(step->key, nonce, counter + PLANE, step->cipher_rounds, low);
    chacha(step->key, nonce, counter + 2 * PLANE, step->cipher_rounds, angle);
    for (int k = 0; k < 16; k++) box_muller(high[k], low[k], angle[k], &first[k], &second[k]);
    store_transposed(first, z + batch * BATCH);
    store_transposed(second, z + PAIRS + batch * BATCH);
}

/* Whether the coordinates begin ... end - 1 of a group have a pair in this batch. */
static inline int touches(int batch, int begin, int end) {
    int from = batch * BATCH, to = from + BATCH;
    return (begin < to && end > from) || (begin < to + PAIRS && end > from + PAIRS);
}

#endif
