/*
 * Adapters in a pass over many tokens: y += s·U·Bᵀ with U = x·Aᵀ; backward dU = s·dy·B, dA += dUᵀ·x, dB += s·dyᵀ·U,
 * dx += dU·A. An act is one site of one adapter on some rows. Ranks are few, and every product is as thin as one of them.
 * An adapter's numbers depend neither on the others in the pass nor on the number of threads.
 */

#include "kernels.h"

struct act {
    const float *a, *b; /* [rank, in], [columns, rank] */
    float *da, *db; /* of the same shapes; added to */
    long start, stop; /* rows */
    long first, columns; /* of the output */
    long rank, low, turned; /* where its ranks stand in a row of `low`, and its b in `turned` */
    float scale;
};

struct deltas {
    const float *x, *dy; /* [rows, in], [rows, out] */
    float *y; /* forward the output, backward dx or null */
    float *low, *back; /* [rows, ranks]: U (forward s·U) and dU */
    float *turned; /* every b as [rank, columns] */
    const struct act *acts;
    long count, rows, in, out, ranks;
};

/* Rows and ranks whose sums stay in registers, and rows of a gradient that are summed before it is added to. */
#define SOME_ROWS (LANES / 4)
#define SOME_RANKS (LANES / 2)
#define BATCH 128

INLINE void shrink_tile(const float *x, long stride, const float *w, long width, float *low, long ranks, float scale,
                        const int rows, const int count) {
    vec sums[SOME_ROWS][4];
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
    for (long row = 0; row < rows; row += SOME_ROWS)
        for (long one = 0; one < rank; one += 4) {
            const float *from = x + row * stride, *by = w + one * width;
            float *to = low + row * ranks + one;
            if (rows - row >= SOME_ROWS && rank - one >= 4)
                shrink_tile(from, stride, by, width, to, ranks, scale, SOME_ROWS, 4);
            else
                for (long r = 0; r < SOME_ROWS && row + r < rows; r++)
                    for (long k = 0; k < 4 && one + k < rank; k++)
                        shrink_tile(from + r * stride, stride, by + k * width, width, to + r * ranks + k, ranks, scale,
                                    1, 1);
        }
}

INLINE void grow_tile(const float *low, long ranks, const float *w, long width, float *y, long stride, const int rows,
                      const int count) {
    long at = 0;
    for (; at + LANES <= width; at += LANES) {
        vec sums[SOME_ROWS];
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
    for (long row = 0; row < rows; row += SOME_ROWS)
        for (long one = 0; one < rank; one += 8) {
            const float *from = low + row * ranks + one, *by = w + one * width;
            float *to = y + row * stride;
            if (rows - row >= SOME_ROWS && rank - one >= 8)
                grow_tile(from, ranks, by, width, to, stride, SOME_ROWS, 8);
            else
                for (long r = 0; r < SOME_ROWS && row + r < rows; r++)
                    for (long k = 0; k < 8 && one + k < rank; k++)
                        grow_tile(from + r * ranks + k, ranks, by + k * width, width, to + r * stride, stride, 1, 1);
        }
}

INLINE void gather_tile(const float *low, long ranks, const float *x, long stride, long rows, float *found,
                        const int count) {
    vec sums[SOME_RANKS][2];
    for (int rank = 0; rank < count; rank++) sums[rank][0] = sums[rank][1] = (vec){0};
    for (long row = 0; row < rows; row++) {
        const vec one = load(x + row * stride), other = load(x + row * stride + LANES);
        for (int rank = 0; rank < count; rank++) {
            sums[rank][0] += low[row * ranks + rank] * one;
            sums[rank][1] += low[row * ranks + rank] * other;
        }
    }
    for (int rank = 0; rank < count; rank++) {
        store(found + rank * 2 * LANES, sums[rank][0]);
        store(found + rank * 2 * LANES + LANES, sums[rank][1]);
    }
}

/* grad += s·lowᵀ·x for the columns from `first` to `last`: a number of [rank, column] stands at rank·`down` + column·`along`. */
static void gather(const float *low, long ranks, const float *x, long stride, long rows, float *grad, long down,
                   long along, long rank, long first, long last, float scale) {
    float found[SOME_RANKS * 2 * LANES];
    for (long one = 0; one < rank; one += SOME_RANKS)
        for (long at = first; at < last; at += 2 * LANES) {
            const long height = rank - one < SOME_RANKS ? rank - one : SOME_RANKS;
            const long width = last - at < 2 * LANES ? last - at : 2 * LANES;
            if (height == SOME_RANKS && width == 2 * LANES)
                gather_tile(low + one, ranks, x + at, stride, rows, found, SOME_RANKS);
            else
                for (long k = 0; k < height; k++)
                    for (long column = 0; column < width; column++) {
                        float total = 0;
                        for (long row = 0; row < rows; row++)
                            total += low[row * ranks + one + k] * x[row * stride + at + column];
                        found[k * 2 * LANES + column] = total;
                    }
            for (long k = 0; k < height; k++)
                for (long column = 0; column < width; column++)
                    grad[(one + k) * down + (at + column) * along] += found[k * 2 * LANES + column] * scale;
        }
}

/* Every b the other way round: a thread has some of its columns. */
static void turn_some(void *given) {
    const struct deltas *job = given;
    const long me = thread_number(), all = thread_count();
    for (const struct act *act = job->acts; act < job->acts + job->count; act++) {
        const long stop = act->columns * (me + 1) / all;
        for (long column = act->columns * me / all; column < stop; column++)
            for (long rank = 0; rank < act->rank; rank++)
                job->turned[act->turned + rank * act->columns + column] = act->b[column * act->rank + rank];
    }
}

/* A thread has some of the rows, a few at a time, so that what is between stays at hand. */
INLINE void act_on_some(const struct deltas *job, const int is_forward) {
    const long me = thread_number(), all = thread_count(), in = job->in, out = job->out, ranks = job->ranks;
    const long first = job->rows * me / all, last = job->rows * (me + 1) / all;
    for (const struct act *act = job->acts; act < job->acts + job->count; act++) {
        const long start = act->start > first ? act->start : first, stop = act->stop < last ? act->stop : last;
        const float *b = job->turned + act->turned;
        for (long row = start; row < stop; row += 16) {
            const long size = stop - row < 16 ? stop - row : 16, at = row * ranks + act->low;
            const float *x = job->x + row * in;
            shrink(x, in, act->a, in, job->low + at, ranks, is_forward ? act->scale : 1.0f, size, act->rank);
            if (is_forward) {
                grow(job->low + at, ranks, b, act->columns, job->y + row * out + act->first, out, size, act->rank);
                continue;
            }
            const float *dy = job->dy + row * out + act->first;
            shrink(dy, out, b, act->columns, job->back + at, ranks, act->scale, size, act->rank);
            if (job->y) grow(job->back + at, ranks, act->a, in, job->y + row * in, in, size, act->rank);
        }
    }
}

static void forward_some(void *given) { act_on_some(given, 1); }
static void backward_some(void *given) { act_on_some(given, 0); }

/* Gradients: a thread has some of the columns, in whole tiles, so that nobody else adds to them. */
static void gather_some(void *given) {
    const struct deltas *job = given;
    const long me = thread_number(), all = thread_count(), in = job->in, out = job->out, ranks = job->ranks;
#define SHARE(width, who) ((who) == all ? (width) : (width) * (who) / all / (2 * LANES) * (2 * LANES))
    for (const struct act *act = job->acts; act < job->acts + job->count; act++)
        for (long row = act->start; row < act->stop; row += BATCH) {
            const long size = act->stop - row < BATCH ? act->stop - row : BATCH, at = row * ranks + act->low;
            gather(job->back + at, ranks, job->x + row * in, in, size, act->da, in, 1, act->rank, SHARE(in, me),
                   SHARE(in, me + 1), 1.0f);
            gather(job->low + at, ranks, job->dy + row * out + act->first, out, size, act->db, 1, act->rank, act->rank,
                   SHARE(act->columns, me), SHARE(act->columns, me + 1), act->scale);
        }
}

void NAME(deltas_forward)(struct deltas *job, long threads) {
    in_parallel(turn_some, job, (unsigned)threads, 0);
    in_parallel(forward_some, job, (unsigned)threads, 0);
}

void NAME(deltas_backward)(struct deltas *job, long threads) {
    in_parallel(turn_some, job, (unsigned)threads, 0);
    in_parallel(backward_some, job, (unsigned)threads, 0);
    in_parallel(gather_some, job, (unsigned)threads, 0);
}
