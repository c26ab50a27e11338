/* Steps of a schedule out of tables of coefficients, for programs that learn the step when they run: what
   bandmf/noise/schedule.py works out in Python, from the tables of bandmf/jax/noise/tables.py. */

#ifndef BANDMF_TABLES_H
#define BANDMF_TABLES_H

#include <stddef.h>

#include "noise.h"

enum { BANDMF_OUTPUTS, BANDMF_INPUTS, BANDMF_BUFFERS }; /* what the history holds */

struct bandmf_tables {
    int64_t kind, steps, slots, lookahead;
    int64_t rows, feed_count, weight_count;
    const int32_t *starts; /* rows: the first step of each */
    const float *feeds;    /* rows x feed_count: of z_i, z_{i-1}, ... */
    const float *weights;  /* rows x weight_count: of the vector of one step ago, two steps ago, ...; or of buffers */
    const float *decays;   /* of the buffers */
};

/* Bytes of `memory` that the two functions need. */
size_t bandmf_step_memory(const struct bandmf_tables *tables);
size_t bandmf_pass_memory(const struct bandmf_tables *tables);

/* The coefficients of step i; NaN past the last one, so that it cannot go unnoticed. */
void bandmf_step_of(const struct bandmf_tables *tables, int64_t i, void *memory, struct bandmf_step *step);

/* Whether a look-ahead pass comes before step i, where the prepared sums hold what was made before step `refreshed`;
   its matrix and size. After a restart that may be in the middle of a period. */
int bandmf_pass_of(const struct bandmf_tables *tables, int64_t i, int64_t refreshed, void *memory,
                   struct bandmf_pass *pass);

#endif
