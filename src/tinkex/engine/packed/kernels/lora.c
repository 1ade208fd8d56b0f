/*
 * LoRA over many tokens (training passes and prompts): y += s·U·Bᵀ with U = x·Aᵀ; backward dU = s·dy·B, dA += dUᵀ·x,
 * dB += s·dyᵀ·U, dx += dU·A. A site is one linear layer of one adapter, acting on some rows. Ranks are few, so every
 * product here is thin. An adapter's numbers depend neither on the other adapters of the pass nor on the number of threads.
 */

#include "kernels.h"

struct lora_site {
    const float *a, *b; /* [rank, in], [columns, rank] */
    float *da, *db; /* of the same shapes; added to */
    long start, stop; /* rows */
    long first, columns; /* of the output */
    long rank, low, b_t; /* `low`: its first rank in a row of `low`; `b_t`: its offset in `b_t` */
    float scale;
};

struct lora_batch {
    const float *x, *dy; /* [rows, in], [rows, out] */
    float *y; /* forward the output, backward dx or null */
    float *low, *dlow; /* [rows, ranks]: U (forward s·U) and dU */
    float *b_t; /* every B transposed, [rank, columns] */
    const struct lora_site *sites;
    long count, rows, in, out, ranks;
};

/* Rows of a gradient that are summed before they are added to it. */
#define BATCH 128

INLINE void shrink_tile(const float *x, long stride, const float *w, long width, float *low, long ranks, float scale,
                        const int rows, const int count) {
    vec sums[LORA_ROWS][4];
    for (int row = 0; row < rows; row++)
        for (int rank = 0; rank < count; rank++) sums[row][rank] = (vec){0};
    long at = 0;
    for (; at + LANES <= width; at += LANES) {
        vec weights[4];
        for (int rank = 0; rank < count; rank++) weights[rank] = load(w + rank * width + at);
        for (int row = 0; row < rows; row++) {
            const vec value = load(x + row * stride + at);
            for (int rank = 0; rank < count; rank++) sums[row][rank] += value * weights[rank];
        }
    }
    for (int row = 0; row < rows; row++)
        for (int rank = 0; rank < count; rank++) {
            float total = sum(sums[row][rank]);
            for (long rest = at; rest < width; rest++) total += x[row * stride + rest] * w[rank * width + rest];
            low[row * ranks + rank] = total * scale;
        }
}

/* low = s·x·wᵀ */
static void shrink(const float *x, long stride, const float *w, long width, float *low, long ranks, float scale,
                   long rows, long rank) {
    for (long row = 0; row < rows; row += LORA_ROWS)
        for (long first = 0; first < rank; first += 4) {
            const float *from = x + row * stride, *by = w + first * width;
            float *to = low + row * ranks + first;
            if (rows - row >= LORA_ROWS && rank - first >= 4)
                shrink_tile(from, stride, by, width, to, ranks, scale, LORA_ROWS, 4);
            else
                for (long r = 0; r < LORA_ROWS && row + r < rows; r++)
                    for (long k = 0; k < 4 && first + k < rank; k++)
                        shrink_tile(from + r * stride, stride, by + k * width, width, to + r * ranks + k, ranks, scale,
                                    1, 1);
        }
}

INLINE void grow_tile(const float *low, long ranks, const float *w, long width, float *y, long stride, const int rows,
                      const int count) {
    long at = 0;
    for (; at + LANES <= width; at += LANES) {
        vec sums[LORA_ROWS];
        for (int row = 0; row < rows; row++) sums[row] = load(y + row * stride + at);
        for (int rank = 0; rank < count; rank++) {
            const vec weight = load(w + rank * width + at);
            for (int row = 0; row < rows; row++) sums[row] += low[row * ranks + rank] * weight;
        }
        for (int row = 0; row < rows; row++) store(y + row * stride + at, sums[row]);
    }
    for (; at < width; at++)
        for (int row = 0; row < rows; row++)
            for (int rank = 0; rank < count; rank++)
                y[row * stride + at] += low[row * ranks + rank] * w[rank * width + at];
}

/* y += low·w */
static void grow(const float *low, long ranks, const float *w, long width, float *y, long stride, long rows,
                 long rank) {
    for (long row = 0; row < rows; row += LORA_ROWS)
        for (long first = 0; first < rank; first += 8) {
            const float *from = low + row * ranks + first, *by = w + first * width;
            float *to = y + row * stride;
            if (rows - row >= LORA_ROWS && rank - first >= 8)
                grow_tile(from, ranks, by, width, to, stride, LORA_ROWS, 8);
            else
                for (long r = 0; r < LORA_ROWS && row + r < rows; r++)
                    for (long k = 0; k < 8 && first + k < rank; k++)
                        grow_tile(from + r * ranks + k, ranks, by + k * width, width, to + r * stride, stride, 1, 1);
        }
}

INLINE void gradient_tile(const float *low, long ranks, const float *x, long stride, long rows, float *result,
                          const int count) {
    vec sums[LORA_RANKS][2];
    for (int rank = 0; rank < count; rank++) sums[rank][0] = sums[rank][1] = (vec){0};
    for (long row = 0; row < rows; row++) {
        const vec left = load(x + row * stride), right = load(x + row * stride + LANES);
        for (int rank = 0; rank < count; rank++) {
            sums[rank][0] += low[row * ranks + rank] * left;
            sums[rank][1] += low[row * ranks + rank] * right;
        }
    }
    for (int rank = 0; rank < count; rank++) {
        store(result + rank * 2 * LANES, sums[rank][0]);
        store(result + rank * 2 * LANES + LANES, sums[rank][1]);
    }
}

/* grad += s·lowᵀ·x for the columns from `first` to `last`. The gradient's [rank, column] is at rank·`down` + column·`along`. */
static void add_gradient(const float *low, long ranks, const float *x, long stride, long rows, float *grad, long down,
                         long along, long rank, long first, long last, float scale) {
    float result[LORA_RANKS * 2 * LANES];
    for (long from = 0; from < rank; from += LORA_RANKS)
        for (long at = first; at < last; at += 2 * LANES) {
            const long height = rank - from < LORA_RANKS ? rank - from : LORA_RANKS;
            const long width = last - at < 2 * LANES ? last - at : 2 * LANES;
            if (height == LORA_RANKS && width == 2 * LANES)
                gradient_tile(low + from, ranks, x + at, stride, rows, result, LORA_RANKS);
            else
                for (long k = 0; k < height; k++)
                    for (long column = 0; column < width; column++) {
                        float total = 0;
                        for (long row = 0; row < rows; row++)
                            total += low[row * ranks + from + k] * x[row * stride + at + column];
                        result[k * 2 * LANES + column] = total;
                    }
            for (long k = 0; k < height; k++)
                for (long column = 0; column < width; column++)
                    grad[(from + k) * down + (at + column) * along] += result[k * 2 * LANES + column] * scale;
        }
}

/* Transpose every B; each thread takes some of its columns. */
static void thread_transpose(void *argument) {
    const struct lora_batch *job = argument;
    const long me = thread_number(), all = thread_count();
    for (const struct lora_site *site = job->sites; site < job->sites + job->count; site++) {
        const long stop = site->columns * (me + 1) / all;
        for (long column = site->columns * me / all; column < stop; column++)
            for (long rank = 0; rank < site->rank; rank++)
                job->b_t[site->b_t + rank * site->columns + column] = site->b[column * site->rank + rank];
    }
}

/* Each thread takes some of the rows, 16 at a time, so that `low` stays in the cache between the two products. */
INLINE void thread_apply(const struct lora_batch *job, const int is_forward) {
    const long me = thread_number(), all = thread_count(), in = job->in, out = job->out, ranks = job->ranks;
    const long first = job->rows * me / all, last = job->rows * (me + 1) / all;
    for (const struct lora_site *site = job->sites; site < job->sites + job->count; site++) {
        const long start = site->start > first ? site->start : first, stop = site->stop < last ? site->stop : last;
        const float *b_t = job->b_t + site->b_t;
        for (long row = start; row < stop; row += 16) {
            const long size = stop - row < 16 ? stop - row : 16, at = row * ranks + site->low;
            const float *x = job->x + row * in;
            shrink(x, in, site->a, in, job->low + at, ranks, is_forward ? site->scale : 1.0f, size, site->rank);
            if (is_forward) {
                grow(job->low + at, ranks, b_t, site->columns, job->y + row * out + site->first, out, size,
                     site->rank);
                continue;
            }
            const float *dy = job->dy + row * out + site->first;
            shrink(dy, out, b_t, site->columns, job->dlow + at, ranks, site->scale, size, site->rank);
            if (job->y) grow(job->dlow + at, ranks, site->a, in, job->y + row * in, in, size, site->rank);
        }
    }
}

static void thread_forward(void *argument) { thread_apply(argument, 1); }
static void thread_backward(void *argument) { thread_apply(argument, 0); }

/* Gradients: each thread takes some of the columns, in whole tiles, so that no two threads add to the same number. */
static void thread_gradients(void *argument) {
    const struct lora_batch *job = argument;
    const long me = thread_number(), all = thread_count(), in = job->in, out = job->out, ranks = job->ranks;
#define SHARE(width, who) ((who) == all ? (width) : (width) * (who) / all / (2 * LANES) * (2 * LANES))
    for (const struct lora_site *site = job->sites; site < job->sites + job->count; site++)
        for (long row = site->start; row < site->stop; row += BATCH) {
            const long size = site->stop - row < BATCH ? site->stop - row : BATCH, at = row * ranks + site->low;
            add_gradient(job->dlow + at, ranks, job->x + row * in, in, size, site->da, in, 1, site->rank,
                         SHARE(in, me), SHARE(in, me + 1), 1.0f);
            add_gradient(job->low + at, ranks, job->dy + row * out + site->first, out, size, site->db, 1, site->rank,
                         site->rank, SHARE(site->columns, me), SHARE(site->columns, me + 1), site->scale);
        }
}

void NAME(lora_forward)(struct lora_batch *job, long threads) {
    in_parallel(thread_transpose, job, (unsigned)threads, 0);
    in_parallel(thread_forward, job, (unsigned)threads, 0);
}

void NAME(lora_backward)(struct lora_batch *job, long threads) {
    in_parallel(thread_transpose, job, (unsigned)threads, 0);
    in_parallel(thread_backward, job, (unsigned)threads, 0);
    in_parallel(thread_gradients, job, (unsigned)threads, 0);
}
