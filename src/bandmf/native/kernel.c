/* One step on part of a group, the look-ahead pass, and the parts of both: compiled once for each WIDTH.

   A group's z stays in the first level of cache; each row of history is read once, and was asked for while the
   cipher was busy. Sums are taken in the order of the NumPy engine. */

#include "convert.h"
#include "normals.h"

#define NAMED(name, width) name##width
#define OF_WIDTH(name, width) NAMED(name, width)

static void draw(const struct bandmf_step *step, uint64_t number, uint32_t tensor, int64_t group, int begin, int end,
                 struct bandmf_drawn *held, float *z) {
    const uint32_t nonce[3] = {(uint32_t)number, (uint32_t)(number >> 32), tensor};
    if (held->group != group || held->tensor != tensor) *held = (struct bandmf_drawn){group, tensor, 0};
    for (int batch = 0; batch < BATCHES; batch++) {
        if (!touches(batch, begin, end) || (held->batches >> batch & 1)) continue;
        draw_batch(step, nonce, group, batch, z);
        held->batches |= 1u << batch;
    }
}

/* to[k] += sum_r weights[r] rows[r][k], four rows at a time and in their order. */
static void add_rows(float *restrict to, const float *base, int64_t stride, const int32_t *slots,
                     const float *weights, int count, int size) {
    int r = 0;
    for (; r + 4 <= count; r += 4) {
        const float *a = base + slots[r] * stride, *b = base + slots[r + 1] * stride;
        const float *c = base + slots[r + 2] * stride, *d = base + slots[r + 3] * stride;
        const float wa = weights[r], wb = weights[r + 1], wc = weights[r + 2], wd = weights[r + 3];
        for (int k = 0; k < size; k++) {
            float sum = to[k] + wa * a[k];
            sum += wb * b[k];
            sum += wc * c[k];
            to[k] = sum + wd * d[k];
        }
    }
    for (; r < count; r++) {
        const float *a = base + slots[r] * stride;
        const float weight = weights[r];
        for (int k = 0; k < size; k++) to[k] += weight * a[k];
    }
}

static void add_to_gradient(const struct bandmf_slice *slice, int64_t at, const float *restrict y, float scale,
                            int size) {
    switch (slice->dtype) {
    case BANDMF_FLOAT32: {
        float *restrict to = (float *)slice->gradient + at;
        for (int k = 0; k < size; k++) to[k] += scale * y[k];
        break;
    }
    case BANDMF_FLOAT64: {
        double *restrict to = (double *)slice->gradient + at;
        for (int k = 0; k < size; k++) to[k] += (double)(scale * y[k]);
        break;
    }
    case BANDMF_FLOAT16: {
        uint16_t *restrict to = (uint16_t *)slice->gradient + at;
        for (int k = 0; k < size; k++) to[k] = to_float16(from_float16(to[k]) + scale * y[k]);
        break;
    }
    default: {
        uint16_t *restrict to = (uint16_t *)slice->gradient + at;
        for (int k = 0; k < size; k++) to[k] = to_bfloat16(from_bfloat16(to[k]) + scale * y[k]);
    }
    }
}

/* Ask for what the step will read, so that it is near when the cipher is done. */
static void ask_for_rows(const struct bandmf_step *step, const struct bandmf_slice *slice, int64_t at, int size) {
    for (int r = 0; r < step->reads; r++) {
        const char *row = (const char *)(slice->history + step->slots[r] * step->history_stride + at);
        for (int64_t k = 0; k < 4 * (int64_t)size; k += 64) __builtin_prefetch(row + k, 0, 2);
    }
}

static void piece(const struct bandmf_step *step, const struct bandmf_slice *slice, int64_t group, int begin, int end,
                  int64_t at, struct bandmf_scratch *scratch) {
    const int size = end - begin;
    float *restrict y = scratch->y;
    float *history = slice->history + at;
    const int64_t stride = step->history_stride;
    ask_for_rows(step, slice, at, size);
    draw(step, step->drawn[0], slice->tensor, group, begin, end, &scratch->drawn, scratch->z);
    const float *z = scratch->z + begin, feed = step->feeds[0];
    for (int k = 0; k < size; k++) y[k] = feed * z[k];
    for (int r = 1; r < step->draws; r++) {
        struct bandmf_drawn nothing = {-1, 0, 0};
        draw(step, step->drawn[r], slice->tensor, group, begin, end, &nothing, scratch->more);
        const float *past = scratch->more + begin, weight = step->feeds[r];
        for (int k = 0; k < size; k++) y[k] += weight * past[k];
    }
    add_rows(y, history, stride, step->slots, step->weights, step->reads, size);
    if (step->prepared >= 0) {
        float *prepared = slice->prepared + step->prepared * step->prepared_stride + at;
        for (int k = 0; k < size; k++) y[k] += prepared[k];
        for (int f = 0; f < step->forward; f++)
            add_rows(prepared + (f + 1) * step->prepared_stride, history, stride, step->slots,
                     step->forward_weights + (int64_t)f * step->reads, step->reads, size);
    }
    if (step->store >= 0) memcpy(history + step->store * stride, step->stores_input ? z : y, 4 * (size_t)size);
    for (int s = 0; s < step->decays; s++) {
        float *restrict buffer = history + s * stride;
        const float decay = step->decay[s];
        for (int k = 0; k < size; k++) buffer[k] = decay * buffer[k] + y[k];
    }
    add_to_gradient(slice, at, y, step->scale, size);
}

/* The pass is a product of matrices. A tile of history is copied to where it stays in the cache whatever the
   distance of its rows in memory; a block of ROWS x COLUMNS vectors of the result stays in registers. */
#define ROWS 4
#define COLUMNS (WIDTH == 16 ? 4 : 2)
#define TILE 128 /* numbers of a row */
#define DEPTH 64 /* rows of history at a time */

static void multiply(const float tile[DEPTH][TILE], const float *const weights[ROWS], int depth, int at,
                     float result[ROWS][TILE], const char *next, int64_t stride) {
    reals sum[ROWS][COLUMNS], past[COLUMNS];
    const float *w0 = weights[0], *w1 = weights[1], *w2 = weights[2], *w3 = weights[3];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) sum[r][c] = load(result[r] + at + c * WIDTH);
    for (int s = 0; s < depth; s++) {
        for (int c = 0; c < COLUMNS; c++) past[c] = load(tile[s] + at + c * WIDTH);
        if (next) __builtin_prefetch(next + s * stride, 0, 2);
        for (int c = 0; c < COLUMNS; c++) {
            sum[0][c] += w0[s] * past[c];
            sum[1][c] += w1[s] * past[c];
            sum[2][c] += w2[s] * past[c];
            sum[3][c] += w3[s] * past[c];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) store(result[r] + at + c * WIDTH, sum[r][c]);
}

static inline void copy(float *to, const float *from, int size) {
    if (size == TILE)
        for (int k = 0; k < TILE; k += WIDTH) store(to + k, load(from + k)); /* no call, no loop */
    else
        memcpy(to, from, 4 * (size_t)size);
}

/* Add what `depth` rows of history contribute, from row `first` on. */
static void pass_tile(const struct bandmf_pass *pass, int64_t first, int depth, int64_t at, int size) {
    float tile[DEPTH][TILE], result[ROWS][TILE];
    const int64_t stride = pass->history_stride;
    for (int s = 0; s < depth; s++) copy(tile[s], pass->history + (first + s) * stride + at, size);
    for (int64_t top = 0; top < pass->rows; top += ROWS) {
        const int rows = (int)(pass->rows - top < ROWS ? pass->rows - top : ROWS);
        const float *weights[ROWS];
        for (int r = 0; r < ROWS; r++) { /* rows past the last repeat it, and are not kept */
            const int64_t row = top + (r < rows ? r : rows - 1);
            weights[r] = pass->matrix + row * pass->columns + first;
            if (first == 0) memset(result[r], 0, sizeof result[r]);
            else copy(result[r], pass->prepared + row * pass->prepared_stride + at, size);
        }
        for (int k = 0, line = 0; k < TILE; k += COLUMNS * WIDTH, line++) {
            /* The first rows of the result ask for the lines of the next tile, one of each row at a time. */
            const int ask = top == 0 && at + 2 * TILE <= pass->size && line < TILE / 16;
            const float *ahead = pass->history + first * stride + at + TILE + 16 * line;
            multiply(tile, weights, depth, k, result, ask ? (const char *)ahead : NULL, 4 * stride);
        }
        for (int r = 0; r < rows; r++)
            copy(pass->prepared + (top + r) * pass->prepared_stride + at, result[r], size);
    }
}

static void pass_range(const struct bandmf_pass *pass, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += TILE) {
        const int size = (int)(end - at < TILE ? end - at : TILE);
        int64_t first = 0;
        do {
            const int64_t left = pass->columns - first;
            pass_tile(pass, first, (int)(left < DEPTH ? left : DEPTH), at, size);
            first += DEPTH;
        } while (first < pass->columns);
    }
}

static void words_of_group(const uint32_t *key, int rounds, uint64_t step, uint32_t tensor, int64_t group,
                           uint32_t *out) {
    const uint32_t nonce[3] = {(uint32_t)step, (uint32_t)(step >> 32), tensor};
    for (int block = 0; block < 3 * PLANE; block += WIDTH) {
        words x[16];
        chacha(key, nonce, (uint32_t)(group * 3 * PLANE) + (uint32_t)block, rounds, x);
        store_transposed((const reals *)x, (float *)out + 16 * block);
    }
}

static void normals_of_words(const uint32_t *given, float *u, float *t, float *z) {
    for (int p = 0; p < PAIRS; p += WIDTH) {
        words high, low, angle;
        memcpy(&high, given + p, sizeof high);
        memcpy(&low, given + PAIRS + p, sizeof low);
        memcpy(&angle, given + 2 * PAIRS + p, sizeof angle);
        reals first, second, uniforms = uniform(high, low), turns = turn(angle);
        box_muller(high, low, angle, &first, &second);
        memcpy(u + p, &uniforms, sizeof uniforms);
        memcpy(t + p, &turns, sizeof turns);
        memcpy(z + p, &first, sizeof first);
        memcpy(z + PAIRS + p, &second, sizeof second);
    }
}

const struct bandmf_kernels OF_WIDTH(bandmf_kernels_, WIDTH) = {
    WIDTH, piece, pass_range, words_of_group, normals_of_words,
};
