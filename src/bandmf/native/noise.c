/* The library's functions: which kernels this machine can run, and a step cut into pieces for its threads. Which
   thread takes which piece changes no bit of the result. */

#include "noise.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#include "threads.h"

extern const struct bandmf_kernels bandmf_kernels_4;
#ifdef BANDMF_X86
extern const struct bandmf_kernels bandmf_kernels_8, bandmf_kernels_16;
#endif

enum { BAD_WIDTH = 1, NO_MEMORY = 2 };

#define PIECES 8              /* that a thread takes at a time */
#define PIECES_PER_THREAD 24  /* at least, or another thread is not worth its start: 49,000 numbers */
#define PASS_NUMBERS 4096     /* that a thread takes at a time */

static const struct bandmf_kernels *kernels_of(int width) {
#ifdef BANDMF_X86
    __builtin_cpu_init();
    int wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int widest = wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (widest && (width == 0 || width == 16)) return &bandmf_kernels_16;
    if (wide && (width == 0 || width == 8)) return &bandmf_kernels_8;
#endif
    return width == 0 || width == 4 ? &bandmf_kernels_4 : NULL;
}

struct shared {
    const struct bandmf_kernels *kernels;
    const struct bandmf_step *step;
    const struct bandmf_slice *slices;
    const int64_t *before; /* pieces of earlier slices, for each slice and at the end */
    int64_t count;
    const struct bandmf_pass *pass;
    atomic_llong next;
};

/* Groups that a span of the slice can touch: a piece for each. */
static int64_t reach(const struct bandmf_slice *slice) {
    if (slice->spans != 1) return (slice->length + BANDMF_GROUP - 2) / BANDMF_GROUP + 1;
    int64_t start = slice->starts[0], end = start + slice->length;
    return (end + BANDMF_GROUP - 1) / BANDMF_GROUP - start / BANDMF_GROUP;
}

static void take_piece(struct shared *work, const struct bandmf_slice *slice, int64_t piece,
                       struct bandmf_scratch *scratch) {
    int64_t groups = reach(slice), span = piece / groups;
    int64_t start = slice->starts[span], end = start + slice->length;
    int64_t group = start / BANDMF_GROUP + piece % groups, first = group * BANDMF_GROUP;
    int64_t begin = first > start ? first : start, stop = first + BANDMF_GROUP < end ? first + BANDMF_GROUP : end;
    if (begin < stop)
        work->kernels->piece(work->step, slice, group, (int)(begin - first), (int)(stop - first),
                             span * slice->length + begin - start, scratch);
}

static int64_t slice_of(const struct shared *work, int64_t piece) {
    int64_t low = 0, high = work->count - 1; /* the last slice that begins at or before the piece */
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (work->before[middle] <= piece) low = middle;
        else high = middle - 1;
    }
    return low;
}

static void *take_steps(void *given) {
    struct shared *work = given;
    struct bandmf_scratch scratch;
    scratch.drawn = (struct bandmf_drawn){-1, 0, 0};
    const int64_t total = work->before[work->count];
    for (int64_t at; (at = atomic_fetch_add(&work->next, PIECES)) < total;) {
        const int64_t end = at + PIECES < total ? at + PIECES : total;
        for (int64_t slice = slice_of(work, at); at < end; at++) {
            while (at >= work->before[slice + 1]) slice++;
            take_piece(work, &work->slices[slice], at - work->before[slice], &scratch);
        }
    }
    return NULL;
}

static void *take_pass(void *given) {
    struct shared *work = given;
    const int64_t size = work->pass->size;
    for (int64_t at; (at = atomic_fetch_add(&work->next, PASS_NUMBERS)) < size;)
        work->kernels->pass(work->pass, at, at + PASS_NUMBERS < size ? at + PASS_NUMBERS : size);
    return NULL;
}

int bandmf_noise_step(const struct bandmf_step *step, const struct bandmf_slice *slices, int64_t count, int threads,
                      int width) {
    struct shared work = {kernels_of(width), step, slices, NULL, count, NULL, 0};
    if (!work.kernels) return BAD_WIDTH;
    int64_t *before = malloc(sizeof(int64_t) * (size_t)(count + 1));
    if (!before) return NO_MEMORY;
    before[0] = 0;
    for (int64_t k = 0; k < count; k++)
        before[k + 1] = before[k] + (slices[k].length ? slices[k].spans * reach(&slices[k]) : 0);
    work.before = before;
    if (before[count]) bandmf_share(take_steps, &work, bandmf_at_most(threads, before[count] / PIECES_PER_THREAD));
    free(before);
    return 0;
}

int bandmf_noise_pass(const struct bandmf_pass *pass, int threads, int width) {
    struct shared work = {kernels_of(width), NULL, NULL, NULL, 0, pass, 0};
    if (!work.kernels) return BAD_WIDTH;
    bandmf_share(take_pass, &work, bandmf_at_most(threads, pass->size * (pass->columns + 1) / (1 << 20)));
    return 0;
}

int bandmf_words(const uint32_t key[8], int rounds, uint64_t step, uint32_t tensor, int64_t group, int width,
                 uint32_t *out) {
    const struct bandmf_kernels *kernels = kernels_of(width);
    if (!kernels) return BAD_WIDTH;
    kernels->words(key, rounds, step, tensor, group, out);
    return 0;
}

int bandmf_normals(const uint32_t *words, int width, float *u, float *t, float *z) {
    const struct bandmf_kernels *kernels = kernels_of(width);
    if (!kernels) return BAD_WIDTH;
    kernels->normals(words, u, t, z);
    return 0;
}

#ifndef BANDMF_DIGEST
#define BANDMF_DIGEST ""
#endif
const char *bandmf_digest(void) { return BANDMF_DIGEST; }
