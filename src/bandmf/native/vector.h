/* Vectors of WIDTH numbers of 32 bits, in the vector extensions of GCC and Clang.

   Every file that includes this is compiled once for each width that a machine may have: 4 (any), 8 (AVX2) and
   16 (AVX-512). All arithmetic is written once; the compiler finds the instructions. */

#ifndef BANDMF_VECTOR_H
#define BANDMF_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef WIDTH
#define WIDTH 4
#endif

typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef float reals __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t bytes __attribute__((vector_size(4 * WIDTH)));

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif

#if WIDTH == 4
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#elif WIDTH == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif

/* Rows become columns: each turn deals two halves of the rows into one another, like cards. */
static inline void transpose(reals x[WIDTH]) {
    reals dealt[WIDTH];
    for (int turn = 1; turn < WIDTH; turn *= 2) {
        for (int k = 0; k < WIDTH / 2; k++) {
            dealt[2 * k] = SHUFFLE(ints, x[k], x[k + WIDTH / 2], LOW);
            dealt[2 * k + 1] = SHUFFLE(ints, x[k], x[k + WIDTH / 2], HIGH);
        }
        memcpy(x, dealt, sizeof dealt);
    }
}

#define ROTATE(x, bits) (((x) << (bits)) | ((x) >> (32 - (bits))))

/* By whole bytes, AVX2 rotates in one shuffle instead of three instructions; AVX-512 has a rotation. */
#if WIDTH == 8
#define SHIFTED(a, b, c, d, at) a + at, b + at, c + at, d + at
#define EVERYWHERE(a, b, c, d)                                                                                \
    SHIFTED(a, b, c, d, 0), SHIFTED(a, b, c, d, 4), SHIFTED(a, b, c, d, 8), SHIFTED(a, b, c, d, 12),          \
        SHIFTED(a, b, c, d, 16), SHIFTED(a, b, c, d, 20), SHIFTED(a, b, c, d, 24), SHIFTED(a, b, c, d, 28)
static inline words rotate16(words x) {
    return (words)SHUFFLE(bytes, (bytes)x, (bytes)x, EVERYWHERE(2, 3, 0, 1));
}
static inline words rotate8(words x) {
    return (words)SHUFFLE(bytes, (bytes)x, (bytes)x, EVERYWHERE(3, 0, 1, 2));
}
#else
static inline words rotate16(words x) { return ROTATE(x, 16); }
static inline words rotate8(words x) { return ROTATE(x, 8); }
#endif
static inline words rotate12(words x) { return ROTATE(x, 12); }
static inline words rotate7(words x) { return ROTATE(x, 7); }

static inline reals load(const float *from) {
    reals x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(float *to, reals x) { memcpy(to, &x, sizeof x); }

static inline reals square_root(reals x) {
#if WIDTH == 16 && defined(__AVX512F__)
    return (reals)_mm512_sqrt_ps((__m512)x);
#elif WIDTH == 8 && defined(__AVX__)
    return (reals)_mm256_sqrt_ps((__m256)x);
#elif WIDTH == 4 && defined(__SSE2__)
    return (reals)_mm_sqrt_ps((__m128)x);
#elif WIDTH == 4 && defined(__aarch64__)
    return (reals)vsqrtq_f32((float32x4_t)x);
#else
    for (int k = 0; k < WIDTH; k++) x[k] = __builtin_sqrtf(x[k]);
    return x;
#endif
}

static inline reals either(ints mask, reals yes, reals no) {
    return (reals)(((ints)yes & mask) | ((ints)no & ~mask));
}

#endif
