/* Steps of a schedule out of tables: see tables.h. */

#include "tables.h"

#include <math.h>
#include <string.h>

static int64_t row_of(const struct bandmf_tables *tables, int64_t i) {
    int64_t low = 0, high = tables->rows - 1; /* the last row that begins at or before step i */
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (tables->starts[middle] <= i) low = middle;
        else high = middle - 1;
    }
    return low;
}

size_t bandmf_step_memory(const struct bandmf_tables *tables) {
    return (size_t)tables->feed_count * (sizeof(uint64_t) + sizeof(float)) +
           (size_t)tables->slots * (sizeof(int32_t) + sizeof(float));
}

size_t bandmf_pass_memory(const struct bandmf_tables *tables) {
    return (size_t)(tables->lookahead * tables->slots) * sizeof(float);
}

void bandmf_step_of(const struct bandmf_tables *tables, int64_t i, void *memory, struct bandmf_step *step) {
    uint64_t *drawn = memory;
    float *feed = (float *)(drawn + tables->feed_count), *weight = feed + tables->feed_count;
    int32_t *slot = (int32_t *)(weight + tables->slots);
    const int valid = i >= 0 && i < tables->steps;
    if (!valid) i = tables->steps - 1;
    const float *feeds = tables->feeds + row_of(tables, i) * tables->feed_count;
    const float *weights = tables->weights + row_of(tables, i) * tables->weight_count;
    const int64_t slots = tables->slots, base = i - i % tables->lookahead;
    int32_t draws = 0, reads = 0;
    for (int64_t r = 0; r < tables->feed_count && r <= i; r++)
        if (r == 0 || feeds[r] != 0) {
            drawn[draws] = (uint64_t)(i - r);
            feed[draws++] = valid ? feeds[r] : NAN;
        }
    if (tables->kind == BANDMF_BUFFERS)
        for (; reads < slots; reads++) slot[reads] = reads, weight[reads] = weights[reads];
    const int64_t reach = tables->kind == BANDMF_BUFFERS ? 0 : tables->lookahead > 1 ? i - base : i < slots ? i : slots;
    for (int64_t r = 1; r <= reach; r++)
        if (tables->kind == BANDMF_OUTPUTS || weights[r - 1] != 0) {
            slot[reads] = (int32_t)((i - r) % slots);
            weight[reads++] = weights[r - 1];
        }
    step->draws = draws, step->drawn = drawn, step->feeds = feed;
    step->reads = reads, step->slots = slot, step->weights = weight;
    step->forward = 0, step->forward_weights = NULL;
    step->decays = tables->kind == BANDMF_BUFFERS ? (int32_t)slots : 0, step->decay = tables->decays;
    step->prepared = tables->lookahead > 1 ? (int32_t)(i - base) : -1;
    step->store = tables->kind != BANDMF_BUFFERS && slots ? (int32_t)(i % slots) : -1;
    step->stores_input = tables->kind == BANDMF_INPUTS;
}

int bandmf_pass_of(const struct bandmf_tables *tables, int64_t i, int64_t refreshed, void *memory,
                   struct bandmf_pass *pass) {
    if (tables->lookahead < 2 || i < 0 || i >= tables->steps) return 0;
    const int64_t base = i - i % tables->lookahead, slots = tables->slots, count = base < slots ? base : slots;
    if (refreshed == base) return 0;
    float *matrix = memory;
    memset(matrix, 0, bandmf_pass_memory(tables));
    for (int64_t t = 0; t < tables->lookahead && base + t < tables->steps; t++) {
        const float *weights = tables->weights + row_of(tables, base + t) * tables->weight_count;
        for (int64_t r = t + 1; r <= slots && r <= t + count; r++) /* the vector of step base + t - r */
            matrix[t * count + (base + t - r) % slots] = weights[r - 1];
    }
    pass->matrix = matrix, pass->rows = tables->lookahead, pass->columns = count;
    return 1;
}
