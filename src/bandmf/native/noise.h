/* What the library offers: one step of a schedule (bandmf/noise/schedule.py) on slices of tensors. */

#ifndef BANDMF_NOISE_H
#define BANDMF_NOISE_H

#include <stdint.h>

#define BANDMF_GROUP 2048
#define BANDMF_API __attribute__((visibility("default")))

enum { BANDMF_FLOAT32, BANDMF_FLOAT64, BANDMF_FLOAT16, BANDMF_BFLOAT16 };

/* Part of one tensor: `spans` runs of `length` consecutive coordinates, one after the other in memory. */
struct bandmf_slice {
    void *gradient;
    float *history, *prepared; /* its columns of the two matrices: row 0 */
    const int64_t *starts;     /* of each span, in the flattened global tensor */
    int64_t spans, length;
    uint32_t tensor;
    int32_t dtype; /* of the gradient */
};

/* y = sum feeds z + sum weights history[slots] + prepared, then what is stored; gradient += scale y. */
struct bandmf_step {
    uint32_t key[8];
    int32_t cipher_rounds;
    int32_t draws, reads, forward, decays;
    int32_t prepared, store; /* rows, or -1 */
    int32_t stores_input;
    float scale;
    int32_t unused; /* so that what follows is aligned; mirrored in bandmf/noise/native.py */
    int64_t history_stride, prepared_stride; /* from row to row, in numbers */
    const uint64_t *drawn;                   /* draws: step of each z */
    const float *feeds;                      /* draws */
    const int32_t *slots;                    /* reads */
    const float *weights;                    /* reads */
    const float *decay;                      /* decays */
    const float *forward_weights;            /* forward x reads: for the next prepared rows */
};

/* prepared = matrix @ history[:columns], for `size` numbers of each row. */
struct bandmf_pass {
    const float *matrix;
    const float *history;
    float *prepared;
    int64_t rows, columns, history_stride, prepared_stride, size;
};

/* Both return 0, or an error number. `width` is 0 for the widest that this machine has. */
BANDMF_API int bandmf_noise_step(const struct bandmf_step *step, const struct bandmf_slice *slices, int64_t count, int threads,
                      int width);
BANDMF_API int bandmf_noise_pass(const struct bandmf_pass *pass, int threads, int width);

/* Whether every number is finite. */
BANDMF_API int bandmf_finite(const void *data, int32_t dtype, int64_t size, int threads);

/* The parts, for tests: the words of a group; u, t and z that words make. */
BANDMF_API int bandmf_words(const uint32_t key[8], int rounds, uint64_t step, uint32_t tensor, int64_t group, int width,
                 uint32_t *out);
BANDMF_API int bandmf_normals(const uint32_t *words, int width, float *u, float *t, float *z);

/* Of the sources that this was built from. */
BANDMF_API const char *bandmf_digest(void);

/* What is compiled once for each width (kernel.c). */
struct bandmf_drawn {
    int64_t group;
    uint32_t tensor, batches; /* bits of what is in z */
};

struct bandmf_scratch {
    _Alignas(64) float z[BANDMF_GROUP], more[BANDMF_GROUP], y[BANDMF_GROUP];
    struct bandmf_drawn drawn;
};

struct bandmf_kernels {
    int width;
    /* Step coordinates begin ... end - 1 of a group, which are numbers at, at + 1, ... of the slice. */
    void (*piece)(const struct bandmf_step *, const struct bandmf_slice *, int64_t group, int begin, int end,
                  int64_t at, struct bandmf_scratch *);
    void (*pass)(const struct bandmf_pass *, int64_t begin, int64_t end);
    void (*words)(const uint32_t *key, int rounds, uint64_t step, uint32_t tensor, int64_t group, uint32_t *out);
    void (*normals)(const uint32_t *words, float *u, float *t, float *z);
};

#endif
