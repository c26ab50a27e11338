/* The block function of ChaCha (RFC 8439) on WIDTH consecutive blocks at once: one vector for each of the 16 words
   of the state, one lane for each block. */

#ifndef BANDMF_CHACHA_H
#define BANDMF_CHACHA_H

#include "vector.h"

#define QUARTER_ROUND(a, b, c, d)                                                                             \
    a += b; d = rotate16(d ^ a);                                                                              \
    c += d; b = rotate12(b ^ c);                                                                              \
    a += b; d = rotate8(d ^ a);                                                                               \
    c += d; b = rotate7(b ^ c);

static inline words everywhere(uint32_t word) { return word - (words){0}; }

/* The words of blocks counter ... counter + WIDTH - 1: out[w] holds word w of each. */
static inline void chacha(const uint32_t key[8], const uint32_t nonce[3], uint32_t counter, int rounds,
                          words out[16]) {
    words start[16], x[16], lane;
    for (int k = 0; k < WIDTH; k++) lane[k] = (uint32_t)k;
    start[0] = everywhere(0x61707865);
    start[1] = everywhere(0x3320646e);
    start[2] = everywhere(0x79622d32);
    start[3] = everywhere(0x6b206574);
    for (int k = 0; k < 8; k++) start[4 + k] = everywhere(key[k]);
    start[12] = everywhere(counter) + lane;
    for (int k = 0; k < 3; k++) start[13 + k] = everywhere(nonce[k]);
    memcpy(x, start, sizeof x);
    for (int round = 0; round < rounds; round += 2) {
        QUARTER_ROUND(x[0], x[4], x[8], x[12])
        QUARTER_ROUND(x[1], x[5], x[9], x[13])
        QUARTER_ROUND(x[2], x[6], x[10], x[14])
        QUARTER_ROUND(x[3], x[7], x[11], x[15])
        QUARTER_ROUND(x[0], x[5], x[10], x[15])
        QUARTER_ROUND(x[1], x[6], x[11], x[12])
        QUARTER_ROUND(x[2], x[7], x[8], x[13])
        QUARTER_ROUND(x[3], x[4], x[9], x[14])
    }
    for (int k = 0; k < 16; k++) out[k] = x[k] + start[k];
}

#endif
