/* Whether every number is finite, in one read and without memory of their size: all bits of the exponent are set in
   infinity and NaN, and in nothing else. */

#include <stdatomic.h>

#include "noise.h"
#include "threads.h"

#define NUMBERS (1 << 16)             /* that a thread takes at a time */
#define NUMBERS_PER_THREAD (1 << 19)  /* at least */

struct numbers {
    const void *data;
    int32_t dtype;
    int64_t size;
    atomic_llong next;
    atomic_int bad;
};

#define ANY(type, exponent)                                                                                   \
    {                                                                                                         \
        const type *at = (const type *)all->data;                                                             \
        for (int64_t k = begin; k < end; k++) bad |= (at[k] & (exponent)) == (exponent);                      \
        break;                                                                                                \
    }

static int any_bad(const struct numbers *all, int64_t begin, int64_t end) {
    int bad = 0;
    switch (all->dtype) {
    case BANDMF_FLOAT32: ANY(uint32_t, 0x7f800000u)
    case BANDMF_FLOAT64: ANY(uint64_t, 0x7ff0000000000000u)
    case BANDMF_FLOAT16: ANY(uint16_t, 0x7c00)
    default: ANY(uint16_t, 0x7f80)
    }
    return bad;
}

static void *look(void *given) {
    struct numbers *all = given;
    for (int64_t at; !atomic_load(&all->bad) && (at = atomic_fetch_add(&all->next, NUMBERS)) < all->size;)
        if (any_bad(all, at, at + NUMBERS < all->size ? at + NUMBERS : all->size)) atomic_store(&all->bad, 1);
    return NULL;
}

int bandmf_finite(const void *data, int32_t dtype, int64_t size, int threads) {
    struct numbers all = {data, dtype, size, 0, 0};
    bandmf_share(look, &all, bandmf_at_most(threads, size / NUMBERS_PER_THREAD));
    return !all.bad;
}
